// Drives the core where the machine gives it less than it asks for: no memory, no thread, no room in a
// connection. Run by sanitize.py.
#include <dlfcn.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "clock.h"
#include "core.h"
#include "kinds.h"
#include "liveness.h"

#define CHECK(condition, ...)                                             \
  do {                                                                    \
    if (!(condition)) {                                                   \
      std::fprintf(stderr, "%s:%d: " #condition " ", __FILE__, __LINE__); \
      std::fprintf(stderr, __VA_ARGS__);                                  \
      std::fprintf(stderr, "\n");                                         \
      std::abort();                                                       \
    }                                                                     \
  } while (false)

namespace {
thread_local int allocations_left = -1;  // of this thread; -1: as many as it wants
thread_local bool was_short = false;
bool no_thread_starts = false;
}  // namespace

__attribute__((noinline)) void* operator new(size_t size) {
  if (allocations_left == 0) {
    was_short = true;
    throw std::bad_alloc();
  }
  if (allocations_left > 0) --allocations_left;
  void* memory = std::malloc(size);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
__attribute__((noinline)) void* operator new(size_t size, const std::nothrow_t&) noexcept {
  if (allocations_left == 0) was_short = true;
  if (allocations_left > 0) --allocations_left;
  return was_short ? nullptr : std::malloc(size);
}
__attribute__((noinline)) void operator delete(void* memory) noexcept { std::free(memory); }
__attribute__((noinline)) void operator delete(void* memory, size_t) noexcept { std::free(memory); }

extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*run)(void*),
                              void* argument) noexcept {
  if (no_thread_starts) return EAGAIN;
  static const auto next = reinterpret_cast<decltype(&pthread_create)>(dlsym(RTLD_NEXT, "pthread_create"));
  return next(thread, attributes, run, argument);
}

namespace {

constexpr int kFloat32 = 1;

tfring_call call_of(int32_t kind) {
  tfring_call call{};
  call.name = "a name that is longer than what a string holds by itself";
  call.kind = kind;
  return call;
}
const tfring_call kAllReduce = call_of(static_cast<int32_t>(tfring::Kind::kAllReduce));
const tfring_call kAllGather = call_of(static_cast<int32_t>(tfring::Kind::kAllGather));
const tfring_call kBarrier = call_of(static_cast<int32_t>(tfring::Kind::kBarrier));

struct Ends {
  int mine;
  int peers;
};

Ends connect_pair() {
  int fds[2];
  CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) == 0, "socketpair");
  return {fds[0], fds[1]};
}

tfring_options options_of(int rank, int size, const tfring_link* link) {
  tfring_options options{};
  options.name = "driver";
  options.host = "here";
  options.identity = 1;
  options.rank = rank;
  options.world_size = size;
  options.links = link;
  options.num_links = size - 1;
  options.timeout_seconds = options.stall_seconds = options.lost_seconds = 60;
  options.opening_timeout_seconds = 60;
  return options;
}

// Calls `body` with memory for `count` allocations; returns whether it wanted more.
template <typename Body>
bool with_allocations(int count, Body body) {
  was_short = false;
  allocations_left = count;
  body();
  allocations_left = -1;
  return was_short;
}

void check_answer(int code, const tfring_error& error) {
  CHECK(code == TFRING_OK || code == TFRING_INTERNAL, "%d: %s", code, error.message);
  CHECK(code == TFRING_OK || std::strlen(error.message) > 0, "an error without words");
}

// No entry point lets an exception out, and none keeps a lock or the turn: what comes next is answered.
void every_entry_point_without_memory() {
  float value = 1, sum = 0;
  static float rows[64];
  const int64_t dims[1] = {1};
  const tfring_tensor tensor{&value, &sum, dims, 1, kFloat32};
  const auto place = [](void*, const int64_t*, int32_t, void** outputs, int32_t* placed) {
    outputs[0] = rows;
    *placed = 1;
  };
  int num_short = 0;
  bool goes_on = true;
  for (int count = 0; goes_on; ++count) {
    CHECK(count < 1000, "it never has enough");
    goes_on = false;
    tfring_error error{};
    const tfring_options options = options_of(0, 1, nullptr);
    int64_t ring = 0;
    const auto try_it = [&](auto body) {
      if (!with_allocations(count, body)) return;
      goes_on = true;
      ++num_short;
    };
    try_it([&] { ring = tfring_open(&options, &error); });
    check_answer(ring > 0 ? TFRING_OK : error.code, error);
    if (ring == 0) ring = tfring_open(&options, &error);
    CHECK(ring > 0, "%s", error.message);
    const int32_t members[1] = {0};
    int64_t group = 0;
    try_it([&] { group = tfring_group(ring, members, 1, kBarrier.name, &error); });
    check_answer(group > 0 ? TFRING_OK : error.code, error);
    int code = TFRING_OK;
    try_it([&] { code = tfring_run(ring, &kAllReduce, &tensor, 1, nullptr, nullptr, nullptr, &error); });
    check_answer(code, error);
    try_it([&] { code = tfring_run(ring, &kAllGather, &tensor, 1, nullptr, place, nullptr, &error); });
    check_answer(code, error);
    // Of no ring: its words take memory.
    try_it([&] { code = tfring_run(-1, &kBarrier, nullptr, 0, nullptr, nullptr, nullptr, &error); });
    CHECK(code == TFRING_INVALID || code == TFRING_INTERNAL, "%d", code);
    try_it([&] { tfring_failure(ring, &error); });
    try_it([&] { tfring_tell_raised(ring, kBarrier.name); });
    try_it([&] { tfring_mark(kBarrier.name); });
    tfring_close(group);
    tfring_close(ring);
  }
  CHECK(num_short > 10, "%d", num_short);
}

// A number that is no collective's is refused, and the ring goes on.
void no_collective_has_another_number() {
  tfring_error error{};
  const tfring_options options = options_of(0, 1, nullptr);
  const int64_t ring = tfring_open(&options, &error);
  CHECK(ring > 0, "%s", error.message);
  for (const int kind : {-1, tfring::kNumKinds, 256}) {
    const tfring_call call = call_of(kind);
    const int code = tfring_run(ring, &call, nullptr, 0, nullptr, nullptr, nullptr, &error);
    CHECK(code == TFRING_INVALID, "%d: %s", code, error.message);
    CHECK(tfring_kind_name(kind) == nullptr, "%d", kind);
  }
  const int code = tfring_run(ring, &kBarrier, nullptr, 0, nullptr, nullptr, nullptr, &error);
  CHECK(code == TFRING_OK, "%s", error.message);
  tfring_close(ring);
}

// A rank without memory breaks the ring: the other does not wait for its timeout.
void the_other_rank_learns_of_it() {
  for (int count = 0; count < 8; ++count) {
    const Ends control = connect_pair(), data = connect_pair();
    const tfring_link links[2] = {{1, control.mine, data.mine, -1, -1, -1, -1, "here", nullptr},
                                  {0, control.peers, data.peers, -1, -1, -1, -1, "here", nullptr}};
    const auto began = std::chrono::steady_clock::now();
    int codes[2] = {TFRING_OK, TFRING_OK};
    bool is_short = false;
    const auto run = [&](int rank) {
      const tfring_options options = options_of(rank, 2, &links[rank]);
      tfring_error error{};
      const int64_t ring = tfring_open(&options, &error);
      CHECK(ring > 0, "%s", error.message);
      std::vector<float> value(1 << 16), sum(value.size());
      const int64_t dims[1] = {static_cast<int64_t>(value.size())};
      const tfring_tensor tensor{value.data(), sum.data(), dims, 1, kFloat32};
      const auto call = [&] {
        codes[rank] = tfring_run(ring, &kAllReduce, &tensor, 1, nullptr, nullptr, nullptr, &error);
      };
      if (rank == 0) {
        is_short = with_allocations(count, call);
      } else {
        call();
      }
      tfring_close(ring);
    };
    std::thread other(run, 1);
    run(0);
    other.join();
    CHECK((codes[0] == TFRING_OK) == (codes[1] == TFRING_OK), "%d and %d", codes[0], codes[1]);
    CHECK(count > 0 || (is_short && codes[1] == TFRING_INTERNAL), "%d", codes[1]);
    CHECK(std::chrono::steady_clock::now() - began < std::chrono::seconds(20), "it waited");
  }
}

// Before any other ring: the thread that watches starts with the first.
void without_a_watcher_no_ring_opens() {
  const Ends control = connect_pair(), data = connect_pair();
  const tfring_link link{1, control.mine, data.mine, -1, -1, -1, -1, "here", nullptr};
  const tfring_options options = options_of(0, 2, &link);
  tfring_error error{};
  no_thread_starts = true;
  const int64_t ring = tfring_open(&options, &error);
  no_thread_starts = false;
  CHECK(ring == 0 && error.code == TFRING_INTERNAL, "%d", error.code);
  CHECK(std::strstr(error.message, "cannot start") != nullptr, "%s", error.message);
  tfring::ControlFrame frame{};
  CHECK(recv(control.peers, &frame, sizeof(frame), 0) == sizeof(frame), "the other rank is not told");
  CHECK(frame.type == static_cast<uint8_t>(tfring::ControlType::kAbort), "%d", frame.type);
  CHECK(std::strstr(frame.message, "cannot start") != nullptr, "%s", frame.message);
  close(control.peers);
  close(data.peers);
}

// Frames that had no room arrive later, whole and in their order.
void frames_without_room_are_sent_later() {
  constexpr int kFrames = 100;
  const Ends control = connect_pair();
  const int size = 4096;
  CHECK(setsockopt(control.mine, SOL_SOCKET, SO_SNDBUF, &size, sizeof(size)) == 0, "setsockopt");
  const tfring_link link{1, control.mine, -1, -1, -1, -1, -1, "here", nullptr};
  const tfring_options options = options_of(0, 2, &link);
  const tfring::Settings settings(options);
  tfring::WakeEvent news;
  tfring::Liveness liveness(settings, &news);
  liveness.add(std::make_unique<tfring::Peer>(link, 60));
  for (int i = 0; i < kFrames; ++i) liveness.tell_raised("error " + std::to_string(i));
  CHECK(!liveness.peer(1)->unsent.empty(), "all had room");
  std::string got;
  const tfring::Poll poll{epoll_create1(EPOLL_CLOEXEC), 7};
  while (got.size() < kFrames * sizeof(tfring::ControlFrame)) {
    char bytes[1000];
    const ssize_t count = recv(control.peers, bytes, sizeof(bytes), MSG_DONTWAIT);
    if (count > 0) got.append(bytes, static_cast<size_t>(count));
    liveness.watch(tfring::now_nanoseconds(), 0, poll);
    const bool waits_for_room = (liveness.peer(1)->polled_for & EPOLLOUT) != 0;
    CHECK(waits_for_room == !liveness.peer(1)->unsent.empty(), "it polls for the wrong thing");
    CHECK(count > 0 || waits_for_room, "%zu bytes came", got.size());
  }
  for (int i = 0; i < kFrames; ++i) {
    tfring::ControlFrame frame;
    std::memcpy(&frame, got.data() + static_cast<size_t>(i) * sizeof(frame), sizeof(frame));
    CHECK(frame.type == static_cast<uint8_t>(tfring::ControlType::kRaised), "%d", frame.type);
    CHECK(frame.message == "error " + std::to_string(i), "%s", frame.message);
  }
  CHECK(recv(control.peers, &got[0], 1, MSG_DONTWAIT) < 0, "more than was sent");
  epoll_event event{};
  CHECK(epoll_wait(poll.epoll_fd, &event, 1, 0) == 0, "it waits for room though it has nothing to send");
  const tfring::ControlFrame ping = tfring::make_control(tfring::ControlType::kPing, 1, 0);
  CHECK(send(control.peers, &ping, sizeof(ping), 0) == sizeof(ping), "send");
  CHECK(epoll_wait(poll.epoll_fd, &event, 1, 0) == 1, "what comes is not polled for");
  CHECK(event.data.u64 == (uint64_t{7} << 32 | 1), "%d", static_cast<int>(event.data.u64));
  liveness.hear(1, tfring::now_nanoseconds());
  CHECK(epoll_wait(poll.epoll_fd, &event, 1, 0) == 0, "it was not read");
  liveness.close();
  close(control.peers);
  close(poll.epoll_fd);
}

}  // namespace

int main() {
  without_a_watcher_no_ring_opens();
  frames_without_room_are_sent_later();
  every_entry_point_without_memory();
  no_collective_has_another_number();
  the_other_rank_learns_of_it();
  std::puts("no memory, no thread, no room: an error each");
  return 0;
}
