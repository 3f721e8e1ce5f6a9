// Feeds the ring frames that no rank would send. Run by sanitize.py, with how many frames and a seed.
//
// A mirror takes the place of the other rank of two: what a rank sends its neighbour is what the neighbour
// would send it, so the mirror sends everything back, with bits flipped, pieces cut out, doubled or made up.
// Whatever comes of it, a collective ends, in a result or in an error, and the sanitizers find nothing.
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "core.h"
#include "frame.h"
#include "kinds.h"
#include "world.h"

#define CHECK(condition, what)                                         \
  do {                                                                 \
    if (!(condition)) {                                                \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, (what)); \
      std::abort();                                                    \
    }                                                                  \
  } while (false)

using tfring::Kind;

namespace {

constexpr int kFloat32 = 1;
constexpr int kInt64 = 9;
constexpr int64_t kFramesASession = 2000;  // looked at alone, for each ring that lives through some
constexpr int64_t kMostRows = 1 << 20;     // for which memory is taken

using Random = std::mt19937_64;

uint64_t below(Random* random, uint64_t bound) { return (*random)() % bound; }

// What numbers like to be where they are wrong.
uint64_t odd_number(Random* random) {
  constexpr uint64_t kOdd[] = {
      0,        1,          127,        128,        255,           256,       0x7fff,     0xffff,
      1u << 20, 0x7fffffff, 0xffffffff, 1ull << 40, INT64_MAX / 2, INT64_MAX, 1ull << 63, UINT64_MAX};
  return kOdd[below(random, sizeof(kOdd) / sizeof(kOdd[0]))];
}

void mutate(Random* random, char* bytes, size_t size) {
  for (uint64_t n = below(random, 4) + 1; n > 0 && size > 0; --n) {
    const size_t at = below(random, size);
    switch (below(random, 4)) {
      case 0:
        bytes[at] = static_cast<char>(bytes[at] ^ (1 << below(random, 8)));
        break;
      case 1:
        bytes[at] = static_cast<char>((*random)());
        break;
      case 2: {
        const uint64_t number = odd_number(random);
        const size_t width = std::min<size_t>(size_t{1} << below(random, 4), size - at);
        std::memcpy(bytes + at / width * width, &number, width);
        break;
      }
      default:  // a run without an end of text
        std::memset(bytes + at, 'x', std::min<size_t>(size - at, below(random, 200)));
    }
  }
}

// Frames alone: what is said of them in words must be within them.
void read_frames(Random* random, int64_t count) {
  const int64_t dims[3] = {5, 7, 11};
  const tfring_tensor tensor{nullptr, nullptr, dims, 3, kFloat32};
  tfring_call call{"a name of some length", 0, 0, 0, 0, 0, 0, 0, nullptr};
  tfring::Group group;
  group.name = "a group";
  size_t length = 0;
  for (int64_t i = 0; i < count; ++i) {
    call.kind = static_cast<int32_t>(i % tfring::kNumKinds);
    const tfring::CallHeader mine = tfring::make_header(group, call, &tensor, 1, static_cast<uint64_t>(i));
    // On the heap, where the sanitizer sees a step beyond the end.
    const std::unique_ptr<tfring::CallHeader> theirs(new tfring::CallHeader(mine));
    if (i % 16 == 15) {
      for (size_t at = 0; at < sizeof(*theirs); at += 8) {
        const uint64_t word = (*random)();
        std::memcpy(reinterpret_cast<char*>(theirs.get()) + at, &word, 8);
      }
    } else {
      mutate(random, reinterpret_cast<char*>(theirs.get()), sizeof(*theirs));
    }
    if (!tfring::agree(mine, *theirs))
      length += (tfring::describe(*theirs) + tfring::describe_place(*theirs)).size();
  }
  if (length == 1) std::puts("");  // it is used
}

// Sends back what comes, some of it changed, until the other side closes.
class Mirror {
 public:
  Mirror(int data, int control, uint64_t seed) : data_(data), control_(control), random_(seed) {
    thread_ = std::thread([this] { run(); });
  }
  ~Mirror() {
    done_ = true;
    thread_.join();
    for (int fd : {data_, control_}) close(fd);
  }
  void begin_to_lie() { lying_ = true; }

 private:
  void run() {
    std::vector<char> piece(64 * 1024);
    bool lied = false;
    int idle = 0;
    while (!done_) {
      pollfd fds[2] = {{data_, POLLIN, 0}, {control_, POLLIN, 0}};
      if (poll(fds, 2, 1) == 0) {
        if (!lied || ++idle < 3) continue;
        for (int fd : {data_, control_}) shutdown(fd, SHUT_RDWR);  // it waits for what was cut out
        return;
      }
      idle = 0;
      if (fds[1].revents != 0) {  // pings, goodbyes, aborts
        const ssize_t got = recv(control_, piece.data(), piece.size(), MSG_DONTWAIT);
        if (got <= 0) return;
        answer(piece.data(), static_cast<size_t>(got), control_);
      }
      if (fds[0].revents == 0) continue;
      const ssize_t got = recv(data_, piece.data(), piece.size(), MSG_DONTWAIT);
      if (got <= 0) return;
      size_t size = static_cast<size_t>(got);
      if (lying_ && below(&random_, 2) == 0) {
        lied = true;
        switch (below(&random_, 8)) {
          case 0:
            size = below(&random_, size + 1);
            break;
          case 1:
            send(data_, piece.data(), size, MSG_NOSIGNAL);
            break;
          default:
            // Behind the first header too, where the numbers of rows stand.
            mutate(&random_, piece.data() + (size > 256 ? below(&random_, 2) * 256 : 0),
                   size > 256 ? 64 : size);
        }
        if (below(&random_, 4) == 0) make_up_control(control_);
      }
      send(data_, piece.data(), size, MSG_NOSIGNAL);
    }
  }

  void answer(char* frames, size_t size, int to) {
    tfring::ControlFrame frame;
    for (size_t at = 0; at + sizeof(frame) <= size; at += sizeof(frame)) {
      std::memcpy(&frame, frames + at, sizeof(frame));
      if (static_cast<tfring::ControlType>(frame.type) != tfring::ControlType::kPing) continue;
      frame.type = static_cast<uint8_t>(tfring::ControlType::kPong);
      send(to, &frame, sizeof(frame), MSG_NOSIGNAL | MSG_DONTWAIT);
    }
  }

  void make_up_control(int to) {
    const auto type = static_cast<tfring::ControlType>(below(&random_, 6));
    tfring::ControlFrame frame = tfring::make_control(type, 1, odd_number(&random_), "made up");
    char* bytes = reinterpret_cast<char*>(&frame);
    if (below(&random_, 2) == 0) {
      std::memset(frame.message, 'x', sizeof(frame.message));
    } else {
      mutate(&random_, bytes + (below(&random_, 2) == 0 ? 6 : 24), 64);
    }
    send(to, bytes, below(&random_, 8) == 0 ? below(&random_, sizeof(frame)) : sizeof(frame),
         MSG_NOSIGNAL | MSG_DONTWAIT);
  }

  const int data_;
  const int control_;
  Random random_;
  std::atomic<bool> done_{false};
  std::atomic<bool> lying_{false};
  std::thread thread_;
};

struct Pair {
  int ours;
  int theirs;
};

Pair connect_pair() {
  int fds[2];
  CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) == 0, "no socketpair");
  return {fds[0], fds[1]};
}

void take_rows(void* context, const int64_t* rows, int32_t, void** outputs, int32_t* placed) {
  auto* memory = static_cast<std::vector<float>*>(context);
  CHECK(rows[0] >= 0 && rows[1] >= 0, "numbers of rows that should have been refused");
  if (rows[0] > kMostRows || rows[1] > kMostRows) return;
  memory->resize(static_cast<size_t>(rows[0] + rows[1]) * 3);
  outputs[0] = memory->data();
  *placed = 1;
}

// Of one table, the rows of both shares and their ids.
void take_sums(void* context, const int64_t* numbers, int32_t, void** outputs, int32_t* placed) {
  auto* memory = static_cast<std::vector<float>*>(context);
  const int64_t rows = numbers[0] + numbers[2];
  CHECK(numbers[0] >= 0 && numbers[2] >= 0 && rows <= kMostRows, "more rows than have come");
  memory->resize(static_cast<size_t>(rows) * 5);
  outputs[0] = memory->data() + 2 * rows;
  outputs[1] = memory->data();
  *placed = 1;
}

void live_through_one(uint64_t seed, int64_t* failed) {
  Random random(seed);
  const Pair data = connect_pair(), control = connect_pair();
  Mirror mirror(data.theirs, control.theirs, seed + 1);
  const tfring_link link{1, control.ours, data.ours, -1, -1, -1, -1, "there", nullptr};
  tfring_options options{};
  options.name = "driver";
  options.host = "here";
  options.identity = 1;
  options.world_size = 2;
  options.links = &link;
  options.num_links = 1;
  options.timeout_seconds = options.stall_seconds = options.lost_seconds = 5;
  options.opening_timeout_seconds = 30;
  tfring_error error{};
  const int64_t ring = tfring_open(&options, &error);
  CHECK(ring > 0, error.message);
  mirror.begin_to_lie();
  std::vector<float> values(below(&random, 4) == 0 ? 60000 : 30), out(values.size()), memory;
  const int64_t dims[2] = {static_cast<int64_t>(values.size() / 3), 3};
  const tfring_tensor tensor{values.data(), out.data(), dims, 2, kFloat32};
  std::vector<int64_t> ids(values.size() / 3);
  for (int64_t& id : ids) id = static_cast<int64_t>(below(&random, 2 * ids.size()));
  const tfring_tensor table[2] = {tensor, {ids.data(), nullptr, dims, 1, kInt64}};
  int code = TFRING_OK;
  for (int i = 0; i < 20 && code == TFRING_OK; ++i) {
    tfring_call call{};
    call.name = "mirrored";
    call.root = static_cast<int32_t>(below(&random, 2));
    const auto run = [&](Kind kind, const tfring_tensor* tensors, int num_tensors, const int64_t* counts,
                         tfring_allocate place) {
      call.kind = static_cast<int32_t>(kind);
      return tfring_run(ring, &call, tensors, num_tensors, counts, place, &memory, &error);
    };
    const int64_t counts[2] = {dims[0] / 3, dims[0] - dims[0] / 3};
    switch (below(&random, 8)) {
      case 0:
        code = run(Kind::kAllReduce, &tensor, 1, nullptr, nullptr);
        break;
      case 1:
        code = run(Kind::kReduceScatter, &tensor, 1, nullptr, nullptr);
        break;
      case 2:
        code = run(Kind::kBarrier, nullptr, 0, nullptr, nullptr);
        break;
      case 3:
        code = run(Kind::kAllToAll, &tensor, 1, counts, take_rows);
        break;
      case 4:
      case 5:
        call.op = 5 + static_cast<int32_t>(below(&random, 2));
        code = run(Kind::kAllReduceRows, table, 2, nullptr, take_sums);
        break;
      default:
        code = run(Kind::kAllGather, &tensor, 1, nullptr, take_rows);
    }
  }
  if (code != TFRING_OK) ++*failed;
  CHECK(code == TFRING_OK || std::strlen(error.message) > 0, "an error without words");
  tfring_close(ring);
}

}  // namespace

int main(int argc, char** argv) {
  const int64_t count = argc > 1 ? std::atoll(argv[1]) : 200000;
  const uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
  Random random(seed);
  int64_t sessions = 0, failed = 0;
  for (int64_t done = 0; done < count; done += kFramesASession) {
    read_frames(&random, std::min(kFramesASession, count - done));
    live_through_one(seed + static_cast<uint64_t>(++sessions) * 2, &failed);
  }
  if (count >= 100 * kFramesASession && failed < sessions / 4) {
    std::fprintf(stderr, "%ld of %ld rings noticed something: the frames are too tame\n",
                 static_cast<long>(failed), static_cast<long>(sessions));
    return 1;
  }
  std::printf("%ld frames, %ld rings, of which %ld failed as they should\n", static_cast<long>(count),
              static_cast<long>(sessions), static_cast<long>(failed));
  return 0;
}
