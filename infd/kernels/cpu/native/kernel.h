// What every kernel's source begins with.
//
// A source is compiled once per instruction set. Whatever is not a kernel stands in an unnamed namespace: an inline
// function that two instruction sets shared would be merged by the linker, and could hold instructions that the CPU
// lacks. For the same reason nothing of the C++ library is used. Kernels that read a whole tensor take pointers,
// counts and strides as int64_t, and strides count elements.

#pragma once

#include <immintrin.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>

#define INFD_JOIN_(isa, name) infd_##isa##_##name
#define INFD_JOIN(isa, name) INFD_JOIN_(isa, name)

// INFD_KERNEL(softmax)(const float* x, int64_t n) { ... }   is infd_avx2_softmax, infd_avx512_softmax, ...
#define INFD_KERNEL(name) extern "C" __attribute__((visibility("default"))) void INFD_JOIN(INFD_ISA, name)
