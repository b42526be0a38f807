// Memory that a kernel needs only while it runs, kept from call to call: fresh memory would fault page by page.
//
// A thread's scratch is never given back. Threads that run kernels are few, and live as long as the process.

#pragma once

#include <stdlib.h>

#include "kernel.h"

namespace {

class Scratch {
 public:
  // Return at least `bytes` bytes, aligned to a cache line, their contents unknown; the same ones in every call.
  char* at_least(int64_t bytes) {
    if (bytes > size_) {
      free(memory_);
      size_ = (bytes + bytes / 4 + 4095) / 4096 * 4096;
      memory_ = static_cast<char*>(aligned_alloc(4096, size_));
      if (memory_ == nullptr) abort();  // the system has overcommitted: nothing that follows could succeed
    }
    return memory_;
  }

 private:
  char* memory_ = nullptr;
  int64_t size_ = 0;
};

// Cuts one piece of memory into several, each aligned to a cache line. Without memory it only adds up the sizes.
class Carver {
 public:
  explicit Carver(char* memory) : memory_(memory) {}

  template <class T>
  T* take(int64_t count) {
    T* taken = reinterpret_cast<T*>(memory_ == nullptr ? nullptr : memory_ + used);
    used += (count * int64_t{sizeof(T)} + 63) / 64 * 64;
    return taken;
  }

  int64_t used = 0;

 private:
  char* memory_;
};

}  // namespace
