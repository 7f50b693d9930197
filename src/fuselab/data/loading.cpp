// The work of a loader's threads without Python's lock: read and check rows, and order a window.

#include <cerrno>
#include <cstdint>
#include <unistd.h>

#include <algorithm>

constexpr int row_words = 40, label_word = 13;  // records.py: 13 floats, the label, 26 indices
constexpr int64_t piece_rows = 1536;            // 240 KiB: checked while they are in the second cache

enum Problem : int64_t { none, ends_early, errno_of_read, wrong_row };

// Whether every word is at most its `largest` and every label is 0 or 1.
inline bool right(const uint32_t* words, int64_t rows, const uint32_t* largest) {
  uint32_t beyond[row_words] = {}, label = 0;
  for (int64_t row = 0; row < rows; ++row, words += row_words) {
    for (int word = 0; word < row_words; ++word) beyond[word] |= words[word] > largest[word];
    const uint32_t bits = words[label_word];
    label |= uint32_t{(bits << 1) != 0} & uint32_t{bits != 0x3f800000u};  // -0.0 is 0, too
  }
  return !label && std::none_of(beyond, beyond + row_words, [](uint32_t any) { return any; });
}

// Fills `out` [rows, 40] from the open file; `found` [2]: a Problem, and errno where it is of one.
void read_rows(int file, int64_t offset, int64_t rows, uint32_t* out, const uint32_t* largest,
               int64_t* found) {
  constexpr int64_t row_bytes = row_words * sizeof(uint32_t);
  found[0] = none;
  for (int64_t first = 0; first < rows; first += piece_rows) {
    const int64_t count = std::min(piece_rows, rows - first);
    uint32_t* const piece = out + first * row_words;
    for (int64_t done = 0; done < count * row_bytes;) {
      const ssize_t got = pread(file, reinterpret_cast<char*>(piece) + done,
                                count * row_bytes - done, offset + first * row_bytes + done);
      if (got < 0 && errno == EINTR) continue;
      if (got <= 0) {
        found[0] = got ? errno_of_read : ends_early;
        found[1] = errno;
        return;
      }
      done += got;
    }
    if (!right(piece, count, largest)) found[0] = wrong_row;  // the rest is read: the first in order
  }
}

// shuffle.py's permutation; `secrets` [2 * rounds]: factor and addend of each round.
void order_rows(int64_t rows, int bits, const uint32_t* secrets, int rounds, uint32_t* out) {
  const uint32_t mask = (1u << bits) - 1;  // below 2^31 rows
  const int half = (bits + 1) / 2;
  const auto scrambled = [&](uint32_t word) {
    for (int round = 0; round < rounds; ++round) {
      word = (word * (secrets[2 * round] | 1) + secrets[2 * round + 1]) & mask;
      word ^= word >> half;
    }
    return word;
  };
  for (int64_t row = 0; row < rows; ++row) out[row] = scrambled(static_cast<uint32_t>(row));
  for (int64_t row = 0; row < rows; ++row)
    while (out[row] >= rows) out[row] = scrambled(out[row]);
}
