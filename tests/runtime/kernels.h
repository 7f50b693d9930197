// A local header: the cache key of a source must follow it.
#pragma once

template <typename T>
T relu(T value) {
  return value > T(0) ? value : T(0);
}
