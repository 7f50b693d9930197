// The fastest way to move given bytes on a CPU: every thread owns a stretch of 64-byte lines, reads
// it from each of READS streams and writes it to each of WRITES streams. NON_TEMPORAL stores spare
// the read of a line that is about to be overwritten, which pays where the output exceeds the cache.

#include <algorithm>
#include <cstdint>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

constexpr int LANES = 16;  // int32 values in a line
constexpr int64_t PARALLEL_LINES = 1024;  // below 64 KiB starting the threads takes longer

// input holds READS streams of read_lines lines one after another, output WRITES of write_lines.
template <int READS, int WRITES, bool NON_TEMPORAL>
void stream(const int32_t* input, int32_t* output, int64_t read_lines, int64_t write_lines) {
  const int64_t lines = std::max(read_lines, write_lines);
  bool found = false;
#pragma omp parallel for schedule(static) reduction(|| : found) if (lines >= PARALLEL_LINES)
  for (int64_t line = 0; line < lines; ++line) {
    alignas(64) int32_t sum[LANES] = {};
    if (line < read_lines) {
      for (int read = 0; read < READS; ++read) {
        for (int lane = 0; lane < LANES; ++lane) {
          sum[lane] ^= input[(read * read_lines + line) * LANES + lane];
        }
      }
    }
    if (line < write_lines) {
      for (int write = 0; write < WRITES; ++write) {
        int32_t* place = output + (write * write_lines + line) * LANES;
#if defined(__x86_64__)
        if constexpr (NON_TEMPORAL) {
          for (int part = 0; part < 4; ++part) {
            _mm_stream_si128(reinterpret_cast<__m128i*>(place) + part,
                             _mm_load_si128(reinterpret_cast<const __m128i*>(sum) + part));
          }
          continue;
        }
#endif
        std::copy(sum, sum + LANES, place);
      }
    }
    // Without streams to write, a value that the inputs (all ones) never give keeps the loads.
    if constexpr (WRITES == 0) {
      int32_t folded = 0;
      for (int lane = 0; lane < LANES; ++lane) folded ^= sum[lane];
      found = found || folded == 0x1e3779b9;
    }
  }
  if (found) output[0] = 1;
#if defined(__x86_64__)
  if constexpr (NON_TEMPORAL) _mm_sfence();
#endif
}
