// Read parts of files to where they belong, and pack on the way what is kept packed. The caller's interpreter is free
// meanwhile; another thread may hold it for a tenth of a second at a time.

#include <errno.h>
#include <unistd.h>

#include "scratch.h"

namespace {

thread_local Scratch scratch;

// 0, the number of an error, or ENODATA where the file ends early.
int read_all(int file, char* to, int64_t bytes, int64_t offset) {
  while (bytes > 0) {
    const ssize_t count = pread(file, to, bytes, offset);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return errno;
    if (count == 0) return ENODATA;
    to += count, offset += count, bytes -= count;
  }
  return 0;
}

}  // namespace

// Rows of a matrix that lie one after the other in a file. `FillPart` of fill.py.
struct FillPart {
  int64_t file, offset, bytes;
  // Packs [rows, inputs] as the outputs from `first` on, as `pack_*` do; null: the bytes go to `place` as they are.
  void (*pack)(void* place, int64_t inputs, const void* rows, int64_t first, int64_t count);
  void* place;
  int64_t inputs, first, rows;
};

// How far the parts are done. `FillProgress` of fill.py.
struct FillProgress {
  int64_t next;  // those before it have been begun
  int64_t failed, error;
};

// Fill the parts from `progress->next` on, at least one. Returns once all are filled, one has failed, or `seconds` are
// over; those begun are filled then.
INFD_KERNEL(fill)(const FillPart* parts, int64_t count, FillProgress* progress, double seconds) {
  const double until = omp_get_wtime() + seconds;
#pragma omp parallel
  do {
    const int64_t at = __atomic_fetch_add(&progress->next, 1, __ATOMIC_RELAXED);
    if (at >= count) break;
    const FillPart& part = parts[at];
    char* to = part.pack == nullptr ? static_cast<char*>(part.place) : scratch.at_least(part.bytes);
    if (const int error = read_all(static_cast<int>(part.file), to, part.bytes, part.offset)) {
#pragma omp critical(infd_fill)
      if (progress->error == 0) {
        progress->failed = at;
        __atomic_store_n(&progress->error, error, __ATOMIC_RELAXED);
      }
    } else if (part.pack != nullptr) {
      part.pack(part.place, part.inputs, to, part.first, part.rows);
    }
  } while (omp_get_wtime() < until && __atomic_load_n(&progress->error, __ATOMIC_RELAXED) == 0);
}
