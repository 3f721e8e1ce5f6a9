// float16 by the conversions of the processor. Included after kernels_loops.h, by files that define kLanes,
// widen_lanes and narrow_lanes.

typedef float Lanes __attribute__((vector_size(4 * kLanes)));

inline Lanes canonical(Lanes values) { return values != values ? Lanes{} + __builtin_nanf("") : values; }

template <typename Operation>
void reduce_float16(void* out, const void* a, const void* b, int64_t count) {
  const auto reduce_lanes = [](void* to, const void* left, const void* right) {
    narrow_lanes(to, canonical(Operation::apply(widen_lanes(left), widen_lanes(right))));
  };
  char* to = static_cast<char*>(out);
  const char* left = static_cast<const char*>(a);
  const char* right = static_cast<const char*>(b);
  for (; count >= kLanes; count -= kLanes, to += 2 * kLanes, left += 2 * kLanes, right += 2 * kLanes) {
    reduce_lanes(to, left, right);
  }
  if (count == 0) return;
  char some_left[2 * kLanes] = {};
  char some_right[2 * kLanes] = {};
  std::memcpy(some_left, left, static_cast<size_t>(2 * count));
  std::memcpy(some_right, right, static_cast<size_t>(2 * count));
  reduce_lanes(some_left, some_left, some_right);
  std::memcpy(to, some_left, static_cast<size_t>(2 * count));
}

void widen_float16(float* out, const void* in, int64_t count) {
  const char* from = static_cast<const char*>(in);
  for (; count >= kLanes; count -= kLanes, out += kLanes, from += 2 * kLanes) {
    store(out, 0, widen_lanes(from));
  }
  if (count == 0) return;
  char some[2 * kLanes] = {};
  std::memcpy(some, from, static_cast<size_t>(2 * count));
  const Lanes last = widen_lanes(some);
  std::memcpy(out, &last, static_cast<size_t>(4 * count));
}

void narrow_float16(void* out, const float* in, int64_t count) {
  char* to = static_cast<char*>(out);
  for (; count >= kLanes; count -= kLanes, in += kLanes, to += 2 * kLanes) {
    narrow_lanes(to, canonical(load<Lanes>(in, 0)));
  }
  if (count == 0) return;
  Lanes last{};
  std::memcpy(&last, in, static_cast<size_t>(4 * count));
  char some[2 * kLanes];
  narrow_lanes(some, canonical(last));
  std::memcpy(to, some, static_cast<size_t>(2 * count));
}
