// The common header of all kernels.
//
// A source is compiled once per instruction set. Everything except kernels is in an unnamed namespace: otherwise the
// linker would merge an inline function's copies for several instruction sets, and could keep a copy with instructions
// that the CPU lacks. For the same reason kernels do not use the C++ standard library. Counts and strides are int64_t;
// strides count elements.

#pragma once

#include <immintrin.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>

#define INFD_JOIN_(isa, name) infd_##isa##_##name
#define INFD_JOIN(isa, name) INFD_JOIN_(isa, name)

// INFD_KERNEL(softmax)(const float* x, int64_t n) { ... }   defines infd_avx2_softmax, infd_avx512_softmax, ...
#define INFD_KERNEL(name) extern "C" __attribute__((visibility("default"))) void INFD_JOIN(INFD_ISA, name)

// INFD_HERE(softmax)(x, n): call the kernel that is compiled for the same instructions as the caller.
#define INFD_HERE(name) INFD_JOIN(INFD_ISA, name)
