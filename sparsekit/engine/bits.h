// Walks over masks, one byte a position.

#ifndef SPARSEKIT_ENGINE_BITS_H_
#define SPARSEKIT_ENGINE_BITS_H_

#include <cstdint>
#include <cstring>

namespace sparsekit {

// The highest bit of each of eight bytes that is not zero.
inline uint64_t SetBytes(const uint8_t* bytes) {
  constexpr uint64_t kLow = 0x7f7f7f7f7f7f7f7fu;
  uint64_t word;
  std::memcpy(&word, bytes, sizeof word);
  return ((word & kLow) + kLow | word) & ~kLow;
}

// How many bytes in [begin, end) are not zero.
inline int64_t CountSet(const uint8_t* bytes, int64_t begin, int64_t end) {
  int64_t count = 0;
  int64_t i = begin;
  for (; i + 8 <= end; i += 8) count += __builtin_popcountll(SetBytes(bytes + i));
  for (; i < end; ++i) count += bytes[i] != 0;
  return count;
}

// Calls visit(i) for each i in [begin, end) whose byte is not zero, in ascending order; eight bytes at a time, since most
// positions of a sparse mask are zero and a branch for each could not be predicted.
template <typename Visit>
inline void ForEachSet(const uint8_t* bytes, int64_t begin, int64_t end, const Visit& visit) {
  int64_t i = begin;
  for (; i + 8 <= end; i += 8) {
    for (uint64_t word = SetBytes(bytes + i); word != 0; word &= word - 1) visit(i + __builtin_ctzll(word) / 8);
  }
  for (; i < end; ++i) {
    if (bytes[i] != 0) visit(i);
  }
}

// The same for each byte that is zero.
template <typename Visit>
inline void ForEachUnset(const uint8_t* bytes, int64_t begin, int64_t end, const Visit& visit) {
  int64_t i = begin;
  constexpr uint64_t kHighest = 0x8080808080808080u;
  for (; i + 8 <= end; i += 8) {
    for (uint64_t word = SetBytes(bytes + i) ^ kHighest; word != 0; word &= word - 1) {
      visit(i + __builtin_ctzll(word) / 8);
    }
  }
  for (; i < end; ++i) {
    if (bytes[i] == 0) visit(i);
  }
}

}  // namespace sparsekit

#endif  // SPARSEKIT_ENGINE_BITS_H_
