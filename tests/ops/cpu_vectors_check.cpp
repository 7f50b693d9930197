// Converts every float16 number to float and back, rounds between all neighbours, and compares with
// the definition of the format. Prints the vector's bytes and the number of errors.
#include <cmath>
#include <cstdio>

#include "cpu_vectors.h"

namespace {

constexpr int step = lanes<Floats>;
int64_t errors = 0;

// The value of a finite float16 number by IEEE 754's definition.
double value_of(unsigned bits) {
  const int exponent = bits >> 10 & 31;
  const double fraction = bits & 0x3ff;
  const double size =
      exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
  return bits & 0x8000 ? -size : size;
}

void expect(bool right, const char* what, unsigned bits) {
  if (!right && errors++ < 10) std::printf("%s of %#x is wrong\n", what, bits);
}

void every_number() {
  for (unsigned base = 0; base < 65536; base += step) {
    Half numbers[step], back[step];
    for (int i = 0; i < step; ++i) numbers[i].bits = base + i;
    const Floats wide = load<Floats>(numbers);
    store<false>(back, wide);
    for (int i = 0; i < step; ++i) {
      const unsigned bits = base + i, magnitude = bits & 0x7fff;
      const float found = wide[i];
      if (magnitude > 0x7c00) {
        expect(std::isnan(found) && (back[i].bits & 0x7fff) > 0x7c00, "NaN", bits);
      } else if (magnitude == 0x7c00) {
        expect(std::isinf(found) && back[i].bits == bits, "infinity", bits);
      } else {
        expect(found == static_cast<float>(value_of(bits)) && back[i].bits == bits, "value", bits);
      }
    }
  }
}

void rounding() {
  for (unsigned bits = 0; bits < 0x7bff; ++bits) {
    const float low = value_of(bits), high = value_of(bits + 1), middle = low + (high - low) / 2;
    const float inputs[] = {std::nextafterf(middle, low), middle, std::nextafterf(middle, high),
                            -middle};
    const unsigned even = bits + (bits & 1);
    const unsigned wanted[] = {bits, even, bits + 1, even | 0x8000};
    Floats values = {};
    for (int i = 0; i < 4; ++i) values[i] = inputs[i];
    Half rounded[step];
    store<false>(rounded, values);
    for (int i = 0; i < 4; ++i) expect(rounded[i].bits == wanted[i], "rounding", bits);
  }
}

void through_double() {
  Half numbers[lanes<Doubles>];
  Doubles values = {};
  values[0] = 1.5;
  store<false>(numbers, values);
  expect(numbers[0].bits == 0x3e00 && load<Doubles>(numbers)[0] == 1.5, "double", 0x3e00);
}

// Halves of negative exponents, which AVX2 and SSE have no shift for in 64 bits.
void halves() {
  for (int64_t n = -1100; n <= 1100; ++n) {
    const auto found = half_of(Integers<Doubles>{} + n);
    expect(found[0] == (n - (n & 1)) / 2, "half", static_cast<unsigned>(n));
  }
}

void reductions() {
  Floats values = {};
  for (int i = 0; i < step; ++i) values[i] = (i * 5 + 3) % step;
  expect(sum_of(values) == step * (step - 1) / 2, "sum", step);
  expect(maximum_of(values) == step - 1 && minimum_of(values) == 0, "maximum", step);
  float part[step + 1];
  for (float& element : part) element = -1;
  store<false>(part, values, First{step - 1});
  expect(part[step - 2] == values[step - 2] && part[step - 1] == -1, "first lanes", step);
}

}  // namespace

int main() {
  every_number();
  rounding();
  through_double();
  halves();
  reductions();
  std::printf("%d bytes, %lld errors\n", static_cast<int>(vector_bytes),
              static_cast<long long>(errors));
  return errors != 0;
}
