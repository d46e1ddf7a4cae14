/* As much of CUDA's runtime and driver as PyTorch needs for tensors on two GPUs that are not there. Their memory is the
   host's, copies are made at once, kernels do nothing; each call whose device or stream matters is noted. It is
   preloaded, so that its functions are found before libcudart's. */
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { kDevices = 2, kLog = 1 << 16 };

static _Thread_local int current, context;
static char notes[kLog];
static size_t used;

static void note(const char* call, int device, cudaStream_t stream, size_t bytes) {
  used += snprintf(notes + used, kLog - used, "%s %d %zu %zu\n", call, device, (size_t)stream, bytes);
}
/* What was noted since the last call of this. */
const char* fake_notes(void) {
  static char said[kLog];
  memcpy(said, notes, used + 1);
  used = 0;
  notes[0] = 0;
  return said;
}

cudaError_t cudaGetDeviceCount(int* count) { *count = kDevices; return cudaSuccess; }
cudaError_t cudaGetDevice(int* device) { *device = current; return cudaSuccess; }
cudaError_t cudaSetDevice(int device) {
  note("set device", device, 0, 0);
  context = 1;
  current = device;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) { *version = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int* version) { *version = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp* p, int device) {
  memset(p, 0, sizeof *p);
  strcpy(p->name, "fake");
  p->major = 9;
  p->multiProcessorCount = 132;
  p->totalGlobalMem = (size_t)1 << 36;
  p->warpSize = 32;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, enum cudaDeviceAttr a, int device) { *value = 1; return cudaSuccess; }
cudaError_t cudaDeviceCanAccessPeer(int* can, int a, int b) { *can = 0; return cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) { *least = 0; *greatest = -1; return cudaSuccess; }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  static size_t next = 0x100;
  *stream = (cudaStream_t)next++;
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t* graph, const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges,
                                     size_t* count) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode* mode) { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { note("synchronize", current, stream, 0); return cudaSuccess; }
cudaError_t cudaDeviceSynchronize(void) { note("synchronize", current, 0, 0); return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) { return cudaSuccess; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) { *event = (cudaEvent_t)8; return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { note("event", current, stream, 0); return cudaSuccess; }
cudaError_t cudaEventQuery(cudaEvent_t event) { return cudaSuccess; }
cudaError_t cudaEventDestroy(cudaEvent_t event) { return cudaSuccess; }
cudaError_t cudaGetLastError(void) { return cudaSuccess; }
cudaError_t cudaPeekAtLastError(void) { return cudaSuccess; }
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) { *free = *total = (size_t)1 << 36; return cudaSuccess; }
cudaError_t cudaMalloc(void** data, size_t bytes) {
  note("allocate", current, 0, bytes);
  *data = aligned_alloc(512, (bytes + 511) / 512 * 512);
  return cudaSuccess;
}
cudaError_t cudaFree(void* data) { free(data); return cudaSuccess; }
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, enum cudaMemcpyKind kind) {
  note("copy and wait", current, 0, bytes);
  memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
  note("copy", current, stream, bytes);
  memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpyPeerAsync(void* to, int there, const void* from, int here, size_t bytes, cudaStream_t stream) {
  note("copy", current, stream, bytes);
  memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(void* kernel, dim3 grid, dim3 block, void** params, size_t shared, cudaStream_t stream) {
  note("launch", current, stream, 0);
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes* a, const void* pointer) {
  memset(a, 0, sizeof *a);
  return cudaSuccess;
}
int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) { *flags = 0; *active = 1; return 0; }
int cuCtxGetCurrent(void** found) { *found = context ? &context : NULL; return 0; }
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned version,
                                             unsigned long long flags, enum cudaDriverEntryPointQueryResult* found) {
  *function = strcmp(name, "cuCtxGetCurrent") == 0 ? (void*)cuCtxGetCurrent : NULL;
  *found = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
/* Pops, or pushes back, the context of this thread. */
void fake_context(int there) { context = there; }
int cuGetErrorString(int error, const char** text) { *text = "fake"; return 0; }
