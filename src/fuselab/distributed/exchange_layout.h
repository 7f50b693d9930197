// Where each element of a message lies, and how one is moved there.
//
// A message has, for every row of a batch, the units of all its pieces side by side: vectors or
// ids. Pieces are described by three numbers: `before` units of a row lie in front of the message,
// a row of the message has `stride` units, and the piece begins `place` units into the row. The
// piece of row b then begins at rows * before + b * stride + place.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define FUSELAB_MOVED __device__ __forceinline__
#else
#include <cstring>
#define FUSELAB_MOVED inline
#endif

struct Piece {
  int64_t before, stride, place;
};

FUSELAB_MOVED int64_t begin_of(const Piece& piece, int64_t rows, int64_t row) {
  return rows * piece.before + row * piece.stride + piece.place;
}

// One target of a gathered row: its first element, and its pieces in the list of all pieces.
struct Target {
  int64_t column, first, pieces;
};

struct bfloat16 {
  uint16_t bits;
};

struct half {
  uint16_t bits;
};

FUSELAB_MOVED uint32_t bits_of(float x) {
#ifdef __CUDACC__
  return __float_as_uint(x);
#else
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
#endif
}
FUSELAB_MOVED float float_of(uint32_t bits) {
#ifdef __CUDACC__
  return __uint_as_float(bits);
#else
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
#endif
}

FUSELAB_MOVED float widened(float x) { return x; }
FUSELAB_MOVED float widened(bfloat16 x) { return float_of(uint32_t(x.bits) << 16); }
FUSELAB_MOVED float widened(half x) {
  const uint32_t sign = uint32_t(x.bits & 0x8000) << 16, rest = x.bits & 0x7fff;
  if (rest >= 0x7c00) return float_of(sign | 0x7f800000 | (rest & 0x3ff) << 13);
  // 2^-14 and above: another bias; below: a fixed-point number of 2^-24
  if (rest >= 0x0400) return float_of(sign | ((rest << 13) + 0x38000000));
  return float_of(sign | bits_of(float(rest) * 0x1p-24f));
}

FUSELAB_MOVED void narrow(float& to, float x) { to = x; }
FUSELAB_MOVED void narrow(bfloat16& to, float x) {  // to nearest even; a NaN stays one
  const uint32_t bits = bits_of(x);
  to.bits = x == x ? uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16) : uint16_t(0x7fc0);
}
FUSELAB_MOVED void narrow(half& to, float x) {  // to nearest even; a NaN stays one
  const uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000;
  uint32_t rest = bits & 0x7fffffff;
  if (rest > 0x7f800000) {
    rest = 0x7e00;
  } else if (rest >= 0x47800000) {  // 65536 and above, infinity included
    rest = 0x7c00;
  } else if (rest < 0x38800000) {  // below 2^-14: adding 0.5 rounds to a multiple of 2^-24
    rest = bits_of(float_of(rest) + 0.5f) - 0x3f000000;
  } else {
    rest = (rest + 0xc8000fff + (rest >> 13 & 1)) >> 13;
  }
  to.bits = uint16_t(sign | rest);
}

template <class Element, int kMany>
struct alignas(sizeof(Element) * kMany) Pack {
  Element element[kMany];
};

// Adds up the pieces of a target, kMany elements of one row, in the pieces' order. A sum of several
// is rounded after every addition, as PyTorch's would be.
template <class From, class To, int kMany>
FUSELAB_MOVED void gather_some(const From* from, To* to, const Target& target, const Piece* pieces,
                               int64_t rows, int64_t row, int64_t row_elements, int offset) {
  Pack<To, kMany> total;
  for (int64_t at = 0; at < target.pieces; ++at) {
    const int64_t begin = begin_of(pieces[target.first + at], rows, row) + offset;
    const auto part = *reinterpret_cast<const Pack<From, kMany>*>(from + begin);
#ifdef __CUDACC__
#pragma unroll
#endif
    for (int i = 0; i < kMany; ++i) {
      To element;
      narrow(element, widened(part.element[i]));
      if (at > 0) narrow(element, widened(total.element[i]) + widened(element));
      total.element[i] = element;
    }
  }
  *reinterpret_cast<Pack<To, kMany>*>(to + row * row_elements + target.column + offset) = total;
}

// Copies kMany elements of one row into a piece of a message.
template <class From, class To, int kMany>
FUSELAB_MOVED void scatter_some(const From* from, To* to, const Piece& piece, int64_t column,
                                int64_t rows, int64_t row, int64_t row_elements, int offset) {
  const auto part = *reinterpret_cast<const Pack<From, kMany>*>(from + row * row_elements +
                                                                 column + offset);
  Pack<To, kMany> written;
#ifdef __CUDACC__
#pragma unroll
#endif
  for (int i = 0; i < kMany; ++i) narrow(written.element[i], widened(part.element[i]));
  *reinterpret_cast<Pack<To, kMany>*>(to + begin_of(piece, rows, row) + offset) = written;
}

// Ids travel in units of 16 bits: one for a table of at most 65,536 rows, else two, the lower first.
FUSELAB_MOVED void pack_id(int64_t id, uint16_t* to, bool is_long) {
  to[0] = uint16_t(id);
  if (is_long) to[1] = uint16_t(uint32_t(id) >> 16);
}
FUSELAB_MOVED int32_t unpacked_id(const uint16_t* from, bool is_long) {
  const uint32_t low = from[0];
  return int32_t(is_long ? low | uint32_t(from[1]) << 16 : low);
}
