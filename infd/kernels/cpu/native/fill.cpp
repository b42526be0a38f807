// Read parts of files to their destinations, packing the parts of packed matrices. ctypes releases Python's global
// interpreter lock during a call.

#include <errno.h>
#include <unistd.h>

#include "scratch.h"

namespace {

thread_local Scratch scratch, ordered_scratch;

// Return 0, an errno, or ENODATA if the file ends early.
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

// Consecutive rows of a matrix in a file. fill.py declares the same structure.
struct FillPart {
  int64_t file, offset, bytes;
  // Packs [rows, inputs] as the outputs from `first` on, like the kernels pack_*; null: the bytes are read to `place`.
  void (*pack)(void* place, int64_t outputs, int64_t inputs, const void* rows, int64_t first, int64_t count);
  void* place;
  int64_t outputs, inputs, first, rows;  // outputs: of the whole matrix
  // Rows of a head in which rows of its two halves alternate, as GGUF stores some matrices: rows 2 i and 2 i + 1 are the
  // outputs i and i + head / 2. The part consists of whole heads. 0: rows are in the outputs' order.
  int64_t head;
};

namespace {

void pack(const FillPart& part, const char* rows) {
  if (part.head == 0) {
    part.pack(part.place, part.outputs, part.inputs, rows, part.first, part.rows);
    return;
  }
  // Packing is fastest for many rows in order.
  const int64_t width = part.bytes / part.rows;
  char* ordered = ordered_scratch.at_least(part.bytes);
  for (int64_t i = 0; i < part.rows; i++) {
    const int64_t of = i % part.head, output = i - of + of % 2 * (part.head / 2) + of / 2;
    memcpy(ordered + output * width, rows + i * width, width);
  }
  part.pack(part.place, part.outputs, part.inputs, ordered, part.first, part.rows);
}

}  // namespace

// The progress through the parts. fill.py declares the same structure.
struct FillProgress {
  int64_t next;  // index of the next part to begin
  int64_t failed, error;  // index of the part that failed first, and its errno; error 0: none has failed
};

// Read and pack the parts from `progress->next` on, at least one. Returns when all parts are done, when a part has
// failed, or when `seconds` have passed and all parts that were begun are done.
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
      pack(part, to);
    }
  } while (omp_get_wtime() < until && __atomic_load_n(&progress->error, __ATOMIC_RELAXED) == 0);
}
