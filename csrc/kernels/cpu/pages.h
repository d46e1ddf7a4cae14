#pragma once

#include <cstddef>

namespace ckptfused {

// Asks for huge pages for a large fresh buffer, before anything touches it. From 32 MiB on glibc's
// malloc maps and unmaps every block (its largest mmap threshold), so such a buffer is paid for
// page by page at every call: 11,000 faults for a [2048, 5504] float32 product. What it gains is in
// benchmarks/NOTES.md: two timing rounds of three, nothing certain. Smaller blocks come from the
// heap, where pages are reused. Advice only: does nothing where the system has no such pages.
void advise_huge_pages(void* data, size_t bytes);

}  // namespace ckptfused
