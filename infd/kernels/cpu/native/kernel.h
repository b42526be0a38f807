// The common header of all kernels.
//
// A source is compiled once per instruction set. Everything but kernels is in an unnamed namespace: the linker would merge
// an inline function of two instruction sets, and the merged one could contain instructions that the CPU lacks. For that
// reason the C++ library is not used either. Kernels take pointers, and counts and strides as int64_t; strides count
// elements.

#pragma once

#include <immintrin.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>

#define INFD_JOIN_(isa, name) infd_##isa##_##name
#define INFD_JOIN(isa, name) INFD_JOIN_(isa, name)

// INFD_KERNEL(softmax)(const float* x, int64_t n) { ... }   is infd_avx2_softmax, infd_avx512_softmax, ...
#define INFD_KERNEL(name) extern "C" __attribute__((visibility("default"))) void INFD_JOIN(INFD_ISA, name)
