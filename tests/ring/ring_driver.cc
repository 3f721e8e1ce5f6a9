// Drives the core without Python: ranks are threads, so that the sanitizers see all of them. Run by
// sanitize.py.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "core.h"
#include "dtype.h"
#include "process.h"

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

constexpr int kFloat32 = 1;
constexpr int kInt64 = 9;
constexpr int kFloat16 = 19;

struct Pair {
  int a;  // the earlier rank's end
  int b;
};

Pair connect_pair() {
  int fds[2];
  CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) == 0, "socketpair");
  return {fds[0], fds[1]};
}

// A ring of threads. Edge r goes from rank r to rank r + 1.
class World {
 public:
  World(int size, bool shared, double timeout_seconds) : size_(size) {
    for (int r = 0; r < size; ++r) {
      control_.push_back(connect_pair());
      data_.push_back(shared ? Pair{-1, -1} : connect_pair());
      memory_.push_back(shared ? memfd_create("mailbox", MFD_CLOEXEC) : -1);
      if (shared) CHECK(ftruncate(memory_.back(), 4096 + 64 * 4096) == 0, "ftruncate");
      int ends[2] = {-1, -1};
      if (shared) CHECK(pipe2(ends, O_CLOEXEC | O_NONBLOCK) == 0, "pipe");
      bell_read_.push_back(ends[0]);
      bell_write_.push_back(ends[1]);
    }
    shared_ = shared;
    timeout_ = timeout_seconds;
  }

  ~World() {
    for (int fd : memory_) {
      if (fd >= 0) close(fd);
    }
    for (int fd : bell_write_) {
      if (fd >= 0) close(fd);
    }
  }

  tfring_options options(int r) const {
    const int next = (r + 1) % size_;
    const int previous = (r + size_ - 1) % size_;
    tfring_options options{};
    options.name = "driver";
    options.rank = r;
    options.world_size = size_;
    options.host = "here";
    options.identity = 1;
    options.next = {control_[r].a, data_[r].a, copy(memory_[next]), copy(bell_write_[next]), "there"};
    options.previous = {control_[previous].b, data_[previous].b, copy(memory_[previous]),
                        copy(bell_write_[previous]), "there"};
    options.mailbox_fd = copy(memory_[r]);
    options.doorbell_fd = bell_read_[r];
    options.num_spins = r % 2 == 0 ? 100 : 0;
    options.timeout_seconds = timeout_;
    options.stall_seconds = 30;
    options.lost_seconds = 15;
    options.opening_timeout_seconds = 30;
    return options;
  }

  void run(const std::function<void(int rank, int64_t ring)>& body) const {
    std::vector<std::thread> threads;
    for (int r = 0; r < size_; ++r) {
      threads.emplace_back([this, r, &body] {
        tfring_error error{};
        const tfring_options mine = options(r);
        const int64_t ring = tfring_open(&mine, &error);
        CHECK(ring > 0, "%s", error.message);
        body(r, ring);
        tfring_close(ring);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

 private:
  static int copy(int fd) { return fd < 0 ? -1 : fcntl(fd, F_DUPFD_CLOEXEC, 0); }

  int size_;
  bool shared_ = false;
  double timeout_ = 0;
  std::vector<Pair> control_;
  std::vector<Pair> data_;
  std::vector<int> memory_;
  std::vector<int> bell_read_;
  std::vector<int> bell_write_;
};

tfring_call named(const char* name, int op = 0, int root = 0) { return {name, op, root, 0, 0}; }

void reduce_in_pieces(int rank, int64_t ring, int size, int64_t count) {
  // Three tensors go round as one; the middle one in place.
  std::vector<float> a(static_cast<size_t>(count), static_cast<float>(rank + 1));
  std::vector<float> b(static_cast<size_t>(count / 3), 2.0f);
  std::vector<float> c(5, static_cast<float>(rank));
  std::vector<float> a_out(a.size());
  std::vector<float> c_out(c.size());
  const int64_t dims[3] = {count, count / 3, 5};
  const tfring_tensor tensors[3] = {{a.data(), a_out.data(), &dims[0], 1, kFloat32},
                                    {b.data(), b.data(), &dims[1], 1, kFloat32},
                                    {c.data(), c_out.data(), &dims[2], 1, kFloat32}};
  tfring_error error{};
  const tfring_call call = named("pieces");
  CHECK(tfring_all_reduce(ring, &call, tensors, 3, &error) == TFRING_OK, "%s", error.message);
  const float ranks = static_cast<float>(size * (size - 1) / 2);
  for (float value : a_out) CHECK(value == ranks + size, "%g", value);
  for (float value : b) CHECK(value == 2.0f * size, "%g", value);
  for (float value : c_out) CHECK(value == ranks, "%g", value);
}

void gather_uneven(int rank, int64_t ring, int size, int64_t rows_each) {
  // Rank r brings r * rows_each rows of 3, and one row of 1.
  const int64_t dims[2][2] = {{rank * rows_each, 3}, {1, 1}};
  std::vector<int64_t> first(static_cast<size_t>(dims[0][0] * 3), rank);
  const int64_t second = 100 + rank;
  const tfring_tensor tensors[2] = {{first.data(), nullptr, dims[0], 2, kInt64},
                                    {&second, nullptr, dims[1], 2, kInt64}};
  struct Result {
    int size;
    int64_t rows_each;
    std::vector<int64_t> first;
    std::vector<int64_t> second;
  } result{size, rows_each, {}, {}};
  const auto place = [](void* context, const int64_t* rows, void** outputs, int32_t* placed) {
    Result& to = *static_cast<Result*>(context);
    int64_t total = 0;
    for (int r = 0; r < to.size; ++r) {
      CHECK(rows[r * 2] == r * to.rows_each, "rank %d", r);
      CHECK(rows[r * 2 + 1] == 1, "rank %d", r);
      total += rows[r * 2];
    }
    to.first.assign(static_cast<size_t>(total * 3), -1);
    to.second.assign(static_cast<size_t>(to.size), -1);
    outputs[0] = to.first.data();
    outputs[1] = to.second.data();
    *placed = 1;
  };
  tfring_error error{};
  const tfring_call call = named("rows");
  CHECK(tfring_all_gather(ring, &call, tensors, 2, place, &result, &error) == TFRING_OK, "%s", error.message);
  size_t at = 0;
  for (int r = 0; r < size; ++r) {
    CHECK(result.second[static_cast<size_t>(r)] == 100 + r, "rank %d", r);
    for (int64_t i = 0; i < r * rows_each * 3; ++i) CHECK(result.first[at++] == r, "rank %d", r);
  }
}

void scatter_and_send(int rank, int64_t ring, int size, int64_t rows) {
  const int64_t dims[2] = {rows, 7};
  std::vector<float> input(static_cast<size_t>(rows * 7));
  for (size_t i = 0; i < input.size(); ++i) input[i] = static_cast<float>(i % 1000);
  int64_t begin = 0;
  int64_t end = 0;
  tfring_chunk(rows, size, rank, &begin, &end);
  std::vector<float> output(static_cast<size_t>((end - begin) * 7));
  const tfring_tensor tensor{input.data(), output.data(), dims, 2, kFloat32};
  tfring_error error{};
  tfring_call call = named("scatter");
  CHECK(tfring_reduce_scatter(ring, &call, &tensor, &error) == TFRING_OK, "%s", error.message);
  for (size_t i = 0; i < output.size(); ++i) {
    CHECK(output[i] == size * input[static_cast<size_t>(begin * 7) + i], "%g", output[i]);
  }
  std::vector<float> sent(input.size());
  for (int root = 0; root < size; ++root) {
    std::vector<float> mine(input.size(), static_cast<float>(rank));
    const tfring_tensor copied{mine.data(), sent.data(), dims, 2, kFloat32};
    call = named("send", 0, root);
    CHECK(tfring_broadcast(ring, &call, &copied, 1, &error) == TFRING_OK, "%s", error.message);
    for (float value : sent) CHECK(value == static_cast<float>(root), "%g", value);
  }
}

// All 65536 halves, against a conversion written another way.
double half_value(uint16_t bits) {
  const double sign = (bits & 0x8000) != 0 ? -1.0 : 1.0;
  const int exponent = (bits >> 10) & 31;
  const int mantissa = bits & 1023;
  if (exponent == 31) return mantissa != 0 ? NAN : sign * INFINITY;
  return sign * (exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25));
}

void halves(int rank, int64_t ring) {
  std::vector<uint16_t> input(65536);
  std::vector<uint16_t> output(65536);
  for (size_t i = 0; i < input.size(); ++i)
    input[i] = rank == 0 ? static_cast<uint16_t>(i) : 0x8000;  // adds -0
  const int64_t dims[1] = {65536};
  const tfring_tensor tensor{input.data(), output.data(), dims, 1, kFloat16};
  tfring_error error{};
  const tfring_call call = named("halves");
  CHECK(tfring_all_reduce(ring, &call, &tensor, 1, &error) == TFRING_OK, "%s", error.message);
  for (size_t i = 0; i < input.size(); ++i) {
    const double want = half_value(static_cast<uint16_t>(i));
    const double got = half_value(output[i]);
    CHECK(std::isnan(want) ? std::isnan(got) : want == got, "%zx became %x", i, output[i]);
  }
}

void everything(int size, bool shared) {
  World(size, shared, 30).run([size](int rank, int64_t ring) {
    tfring_error error{};
    for (int64_t count : {0, 1, 10, 4000, 40000, 150001}) {
      reduce_in_pieces(rank, ring, size, count);
      gather_uneven(rank, ring, size, count / 20);
      scatter_and_send(rank, ring, size, count / 20);
      const tfring_call call = named("wait");
      CHECK(tfring_barrier(ring, &call, &error) == TFRING_OK, "%s", error.message);
    }
    halves(rank, ring);
    tfring_statistics statistics{};
    CHECK(tfring_get_statistics(ring, &statistics) == TFRING_OK, "statistics");
    CHECK(size == 1 || statistics.bytes_sent > 0, "statistics");
  });
}

// All instructions give the same bits, at any alignment, and touch nothing outside: memory ends where the
// numbers do.
void arithmetic() {
  constexpr int kDtypes[] = {1, 2, 3, 4, 5, 6, 8, 9, 10, 14, 17, 18, 19, 22, 23};
  for (const char* instructions : {"plain", "avx2", "avx512"}) {
    if (tfring_use_instructions(instructions) == 0) continue;
    for (int dtype : kDtypes) {
      const size_t item = static_cast<size_t>(tfring::size_of(static_cast<tfring::DType>(dtype)));
      for (int op = 0; op < 4; ++op) {
        if (!tfring::can_reduce(static_cast<tfring::DType>(dtype), static_cast<tfring::Op>(op))) continue;
        for (size_t count : {0, 1, 7, 33, 2049}) {
          const size_t offset = count % 8;
          const size_t size = count * item;
          std::vector<std::vector<char>> memory(5, std::vector<char>(offset + size));
          uint32_t random = 1;
          for (size_t i = offset; i < offset + size; ++i) {
            for (int m = 0; m < 3; ++m) {
              random = random * 1664525 + 1013904223;
              memory[m][i] = static_cast<char>(dtype == 10 ? random >> 31 : random >> 24);
            }
          }
          void* at[5];
          for (int m = 0; m < 5; ++m) at[m] = memory[m].data() + offset;
          const int64_t n = static_cast<int64_t>(count);
          tfring_use_instructions(instructions);
          tfring_reduce(dtype, op, at[3], at[0], at[1], n);
          tfring_use_instructions("plain");
          tfring_reduce(dtype, op, at[4], at[0], at[1], n);
          CHECK(memory[3] == memory[4], "%s: dtype %d, op %d, %zu", instructions, dtype, op, count);
          tfring_reduce_many(dtype, op, at[4], at, 3, n);
          tfring_use_instructions(instructions);
          tfring_reduce_many(dtype, op, at[0], at, 3, n);
          CHECK(memory[0] == memory[4], "%s: three of dtype %d, op %d, %zu", instructions, dtype, op, count);
        }
      }
    }
  }
}

void disagreement(int size, bool shared) {
  World(size, shared, 30).run([](int rank, int64_t ring) {
    const int64_t dims[1] = {rank == 1 ? 9 : 100000};
    std::vector<float> values(100000);
    const tfring_tensor tensor{values.data(), values.data(), dims, 1, kFloat32};
    const tfring_call call = named("odd");
    tfring_error error{};
    CHECK(tfring_all_reduce(ring, &call, &tensor, 1, &error) == TFRING_MISMATCH, "%s", error.message);
    CHECK(std::strstr(error.message, "rank 1 called all_reduce \"odd\" sum float32[9]") != nullptr, "%s",
          error.message);
    CHECK(tfring_barrier(ring, &call, &error) == TFRING_MISMATCH, "%s", error.message);
  });
}

void leaving(int size, bool shared) {
  World(size, shared, 30).run([](int rank, int64_t ring) {
    if (rank == 0) return;
    const tfring_call call = named("left");
    tfring_error error{};
    CHECK(tfring_barrier(ring, &call, &error) == TFRING_PEER_LOST, "%s", error.message);
    CHECK(std::strstr(error.message, "rank 0 left the ring") != nullptr, "%s", error.message);
  });
}

void standing_still(int size, bool shared) {
  std::atomic<int> told{0};
  World(size, shared, 0.3).run([&told, size](int rank, int64_t ring) {
    const tfring_call call = named("late");
    tfring_error error{};
    if (rank == 0) {
      while (told < size - 1) usleep(1000);
    } else {
      CHECK(tfring_barrier(ring, &call, &error) == TFRING_TIMEOUT, "%s", error.message);
      CHECK(std::strstr(error.message, "rank 0 takes no part") != nullptr, "%s", error.message);
      ++told;
    }
  });
}

void closing_meanwhile(int size, bool shared) {
  World(size, shared, 30).run([](int rank, int64_t ring) {
    const tfring_call call = named("closed");
    tfring_error error{};
    std::thread closer;
    if (rank == 0) {
      closer = std::thread([ring] {
        usleep(100000);
        tfring_close(ring);
      });
    }
    int code = TFRING_OK;
    for (int i = 0; i < 100000000 && code == TFRING_OK; ++i) code = tfring_barrier(ring, &call, &error);
    CHECK(code == TFRING_PEER_LOST || code == TFRING_INVALID, "%s", error.message);
    if (closer.joinable()) closer.join();
  });
}

// Two threads of a rank share one ring; which goes first is the program's matter, so they call the same.
void sharing() {
  World(2, true, 30).run([](int, int64_t ring) {
    const auto body = [ring] {
      const tfring_call call = named("shared");
      tfring_error error{};
      for (int i = 0; i < 200; ++i)
        CHECK(tfring_barrier(ring, &call, &error) == TFRING_OK, "%s", error.message);
    };
    std::thread other(body);
    body();
    other.join();
  });
}

}  // namespace

// Threads that all wait are stuck only if the peer waits for what has not begun here: its answer may be older
// than what this process has sent it since.
static void waiting_for_each_other() {
  const uint64_t mine = 1;
  const uint64_t theirs = 2;
  const std::atomic<uint64_t> begun_in_mine{5};
  const std::atomic<uint64_t> begun_in_theirs{3};
  tfring::join_ring(mine, &begun_in_mine);
  tfring::join_ring(theirs, &begun_in_theirs);
  tfring_set_pool_size(1);
  tfring::Pong pong{};
  pong.num_waiting = 1;
  pong.waiting[0] = {theirs, 4};
  CHECK(!tfring::wait_for_each_other(pong), "a thread is free");
  tfring::stands_still(mine);
  CHECK(tfring::wait_for_each_other(pong),
        "the fourth has not begun here, and no thread is free to begin it");
  pong.waiting[0] = {theirs, 3};
  CHECK(!tfring::wait_for_each_other(pong), "the third has begun here");
  pong.waiting[0] = {3, 1};
  CHECK(!tfring::wait_for_each_other(pong), "this process is not in that ring");
  tfring::Pong told{};
  tfring::tell_waiting(&told);
  CHECK(told.num_waiting == 1 && told.waiting[0].ring == mine && told.waiting[0].begun == 5, "what is told");
  tfring::moves_again(mine);
  tfring_set_pool_size(0);
  tfring::leave_ring(theirs);
  tfring::leave_ring(mine);
}

int main() {
  arithmetic();
  for (bool shared : {false, true}) {
    for (int size : {1, 2, 3, 5}) everything(size, shared);
    for (int size : {2, 4}) {
      disagreement(size, shared);
      leaving(size, shared);
      standing_still(size, shared);
      closing_meanwhile(size, shared);
    }
  }
  sharing();
  waiting_for_each_other();
  std::puts("every scenario passed");
  return 0;
}
