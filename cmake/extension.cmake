# The extension ckptfused._C. Torch is asked through Python rather than find_package(Torch), which
# wants a CUDA toolkit whenever torch was built with CUDA.
find_package(Python REQUIRED COMPONENTS Interpreter Development.Module)
execute_process(
  COMMAND ${Python_EXECUTABLE} -c
  "import torch; from torch.utils import cpp_extension as e; \
print(torch.__version__, ';'.join(e.include_paths()), ';'.join(e.library_paths()), sep='\\n')"
  OUTPUT_VARIABLE torch_says COMMAND_ERROR_IS_FATAL ANY OUTPUT_STRIP_TRAILING_WHITESPACE)
string(REPLACE ";" "\\;" torch_says "${torch_says}")
string(REPLACE "\n" ";" torch_says "${torch_says}")
list(GET torch_says 0 torch_version)
list(GET torch_says 1 torch_include)
list(GET torch_says 2 torch_libraries)
file(STRINGS ${CMAKE_SOURCE_DIR}/setup.py version_line REGEX "^VERSION = ")
string(REGEX MATCH "[0-9][^\"]*" version "${version_line}")

find_package(OpenMP REQUIRED COMPONENTS CXX)
set_target_properties(ckptfused_kernels PROPERTIES POSITION_INDEPENDENT_CODE ON)
file(GLOB_RECURSE EXTENSION_SOURCES CONFIGURE_DEPENDS csrc/ops/*.cpp csrc/block/*.cpp csrc/autograd/*.cpp
  csrc/loss/*.cpp csrc/experts/*.cpp csrc/python/*.cpp)
list(FILTER EXTENSION_SOURCES EXCLUDE REGEX "_cuda\\.cpp$")
Python_add_library(_C MODULE WITH_SOABI ${EXTENSION_SOURCES})
target_compile_features(_C PRIVATE cxx_std_20)
# NDEBUG as in PyTorch's own build: without it its classes have other members.
target_compile_definitions(_C PRIVATE NDEBUG TORCH_EXTENSION_NAME=_C TORCH_API_INCLUDE_EXTENSION_H
  CKPTFUSED_VERSION="${version}" CKPTFUSED_TORCH_VERSION="${torch_version}")
target_include_directories(_C SYSTEM PRIVATE ${torch_include})
target_link_directories(_C PRIVATE ${torch_libraries})
target_link_libraries(_C PRIVATE ckptfused_kernels OpenMP::OpenMP_CXX c10 torch torch_cpu torch_python)
target_precompile_headers(_C PRIVATE csrc/ops/torch.h)
set_target_properties(_C PROPERTIES CXX_VISIBILITY_PRESET hidden LIBRARY_OUTPUT_DIRECTORY ckptfused)
