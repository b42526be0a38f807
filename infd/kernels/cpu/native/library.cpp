// Queries that precede any kernel call: which instruction sets the CPU supports, and which sources this library was
// built from. Compiled for any x86-64 CPU.

#include <cpuid.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

#define INFD_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

struct Feature {
  const char* name;
  bool present;
};

// The register XCR0: one bit for each register set that the operating system saves on a context switch.
uint64_t saved_registers() {
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) return 0;
  uint32_t low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (uint64_t{high} << 32) | low;
}

const char* first_missing(const Feature* features, int count) {
  for (int i = 0; i < count; i++)
    if (!features[i].present) return features[i].name;
  return nullptr;
}

}  // namespace

INFD_EXPORT const char* infd_sources() { return INFD_SOURCES; }

// Return the first feature of an instruction set that the CPU or the operating system lacks, or null.
INFD_EXPORT const char* infd_avx2_missing() {
  __builtin_cpu_init();
  const Feature features[] = {
      {"AVX2", __builtin_cpu_supports("avx2") != 0},
      {"FMA", __builtin_cpu_supports("fma") != 0},
      {"F16C", __builtin_cpu_supports("f16c") != 0},
      {"BMI2", __builtin_cpu_supports("bmi2") != 0},
      {"AVX registers kept by the system", (saved_registers() & 0x6) == 0x6},
  };
  return first_missing(features, 5);
}

INFD_EXPORT const char* infd_avx512_missing() {
  if (const char* missing = infd_avx2_missing()) return missing;
  const Feature features[] = {
      {"AVX512F", __builtin_cpu_supports("avx512f") != 0},
      {"AVX512BW", __builtin_cpu_supports("avx512bw") != 0},
      {"AVX512DQ", __builtin_cpu_supports("avx512dq") != 0},
      {"AVX512VL", __builtin_cpu_supports("avx512vl") != 0},
      {"AVX-512 registers kept by the system", (saved_registers() & 0xe6) == 0xe6},
  };
  return first_missing(features, 5);
}

INFD_EXPORT const char* infd_avx512_bf16_missing() {
  if (const char* missing = infd_avx512_missing()) return missing;
  const Feature features[] = {
      {"AVX512_BF16", __builtin_cpu_supports("avx512bf16") != 0},
      {"AVX512_VNNI", __builtin_cpu_supports("avx512vnni") != 0},
  };
  return first_missing(features, 2);
}

INFD_EXPORT const char* infd_avx512_vbmi_missing() {
  if (const char* missing = infd_avx512_bf16_missing()) return missing;
  const Feature features[] = {{"AVX512_VBMI", __builtin_cpu_supports("avx512vbmi") != 0}};
  return first_missing(features, 1);
}

// Asks Linux for permission to use the tile registers, of 8 KiB, which all threads of the process then have.
INFD_EXPORT const char* infd_amx_missing() {
  constexpr long REQUEST = 0x1023, TILES = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  constexpr unsigned BF16 = 1 << 22, TILE = 1 << 24, INT8 = 1 << 25;
  if (const char* missing = infd_avx512_vbmi_missing()) return missing;
  unsigned a, b, c, d = 0;
  const bool known = __get_cpuid_count(7, 0, &a, &b, &c, &d);
  const Feature features[] = {
      {"AMX_TILE", known && (d & TILE)},
      {"AMX_BF16", known && (d & BF16)},
      {"AMX_INT8", known && (d & INT8)},
      {"tile registers kept by the system", (saved_registers() & 0x60000) == 0x60000},
  };
  if (const char* missing = first_missing(features, 4)) return missing;
  return syscall(SYS_arch_prctl, REQUEST, TILES) == 0 ? nullptr : "permission to use tile registers";
}
