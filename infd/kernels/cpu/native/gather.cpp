// Rows of a table, by index.

#include "kernel.h"

// out [count, row_bytes] = table [size, row_bytes] at rows. A row that does not exist is all ones: NaN in every float.
INFD_KERNEL(gather_rows)
(char* out, const char* table, int64_t size, const int64_t* rows, int64_t count, int64_t row_bytes) {
#pragma omp parallel for if (count* row_bytes > (1 << 16))
  for (int64_t i = 0; i < count; i++) {
    if (rows[i] >= 0 && rows[i] < size)
      memcpy(out + i * row_bytes, table + rows[i] * row_bytes, row_bytes);
    else
      memset(out + i * row_bytes, 0xff, row_bytes);
  }
}
