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

#include "calls.h"
#include "core.h"
#include "dtype.h"
#include "kinds.h"
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

using tfring::Kind;

namespace {

constexpr int kFloat32 = 1;
constexpr int kInt64 = 9;
constexpr int kFloat16 = 19;

struct Pair {
  int a;
  int b;
};

Pair connect_pair() {
  int fds[2];
  CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) == 0, "socketpair");
  return {fds[0], fds[1]};
}

const char* tls_library = nullptr;  // with OpenSSL, while connections are to be encrypted

void* encrypt(int fd, bool accepts) {
  tfring_error error{};
  const char key[] = "the 32 bytes of a key for a test";
  void* tls = tfring_tls_open(tls_library, fd, accepts ? 1 : 0, key, 30, &error);
  CHECK(tls != nullptr, "%s", error.message);
  return tls;
}

// A mailbox and its doorbell, written by one rank and read by another.
struct Box {
  int memory = -1;
  int bell_read = -1;
  int bell_write = -1;

  static Box make() {
    Box box;
    box.memory = memfd_create("mailbox", MFD_CLOEXEC);
    CHECK(ftruncate(box.memory, 4096 + 64 * 4096) == 0, "ftruncate");
    int ends[2];
    CHECK(pipe2(ends, O_CLOEXEC | O_NONBLOCK) == 0, "pipe");
    box.bell_read = ends[0];
    box.bell_write = ends[1];
    return box;
  }
};

// Threads as ranks, each linked to each. `num_hosts` they are dealt to round-robin.
class World {
 public:
  World(int size, bool shared, double timeout_seconds, int algorithm = 0, int num_hosts = 1)
      : size_(size), timeout_(timeout_seconds), algorithm_(algorithm), links_(static_cast<size_t>(size)) {
    for (int r = 0; r < size; ++r) hosts_.push_back(r % num_hosts);
    for (int a = 0; a < size; ++a) {
      for (int b = a + 1; b < size; ++b) {
        const Pair control = connect_pair();
        const Pair data = shared ? Pair{-1, -1} : connect_pair();
        const Box to_a = shared ? Box::make() : Box();
        const Box to_b = shared ? Box::make() : Box();
        void* tls[2] = {nullptr, nullptr};
        if (tls_library != nullptr && !shared) {
          std::thread other([&] { tls[1] = encrypt(data.b, true); });
          tls[0] = encrypt(data.a, false);
          other.join();
        }
        add(a, {b, control.a, data.a, copy(to_a.memory), to_a.bell_read, copy(to_b.memory), to_b.bell_write,
                "there", tls[0]});
        add(b, {a, control.b, data.b, copy(to_b.memory), to_b.bell_read, copy(to_a.memory), to_a.bell_write,
                "there", tls[1]});
        for (int fd : {to_a.memory, to_b.memory}) {
          if (fd >= 0) close(fd);
        }
      }
    }
  }

  void run(const std::function<void(int rank, int64_t ring)>& body) const {
    std::vector<std::thread> threads;
    for (int r = 0; r < size_; ++r) {
      threads.emplace_back([this, r, &body] {
        tfring_error error{};
        const std::vector<tfring_link>& links = links_[static_cast<size_t>(r)];
        tfring_options mine{};
        mine.name = "driver";
        mine.rank = r;
        mine.world_size = size_;
        mine.host = "here";
        mine.identity = 1;
        mine.links = links.data();
        mine.num_links = static_cast<int>(links.size());
        mine.algorithm = algorithm_;
        mine.hosts = hosts_.data();
        mine.num_spins = r % 2 == 0 ? 100 : 0;
        mine.timeout_seconds = timeout_;
        mine.stall_seconds = 30;
        mine.lost_seconds = 15;
        mine.opening_timeout_seconds = 30;
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
  void add(int rank, const tfring_link& link) { links_[static_cast<size_t>(rank)].push_back(link); }

  int size_;
  double timeout_;
  int algorithm_;
  std::vector<int32_t> hosts_;
  std::vector<std::vector<tfring_link>> links_;
};

tfring_call named(Kind kind, const char* name, int op = 0, int root = 0) {
  return {name, static_cast<int32_t>(kind), op, root, 0, 0, 0, 0, nullptr};
}

// Of a kind whose sizes are known.
int run(int64_t ring, const tfring_call& call, const tfring_tensor* tensors, int num_tensors,
        tfring_error* error) {
  return tfring_run(ring, &call, tensors, num_tensors, nullptr, nullptr, nullptr, error);
}

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
  const tfring_call call = named(Kind::kAllReduce, "pieces");
  CHECK(run(ring, call, tensors, 3, &error) == TFRING_OK, "%s", error.message);
  const float ranks = static_cast<float>(size * (size - 1) / 2);
  for (float value : a_out)
    CHECK(value == ranks + size, "%g at rank %d of %d, %ld", value, rank, size, long(count));
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
  const auto place = [](void* context, const int64_t* rows, int32_t, void** outputs, int32_t* placed) {
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
  const tfring_call call = named(Kind::kAllGather, "rows");
  CHECK(tfring_run(ring, &call, tensors, 2, nullptr, place, &result, &error) == TFRING_OK, "%s",
        error.message);
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
  tfring_call call = named(Kind::kReduceScatter, "scatter");
  CHECK(run(ring, call, &tensor, 1, &error) == TFRING_OK, "%s", error.message);
  for (size_t i = 0; i < output.size(); ++i) {
    CHECK(output[i] == size * input[static_cast<size_t>(begin * 7) + i], "%g", output[i]);
  }
  std::vector<float> sent(input.size());
  for (int root = 0; root < size; ++root) {
    std::vector<float> mine(input.size(), static_cast<float>(rank));
    const tfring_tensor copied{mine.data(), sent.data(), dims, 2, kFloat32};
    call = named(Kind::kBroadcast, "send", 0, root);
    CHECK(run(ring, call, &copied, 1, &error) == TFRING_OK, "%s", error.message);
    for (float value : sent) CHECK(value == static_cast<float>(root), "%g", value);
  }
}

void total_at_each(int rank, int64_t ring, int size, int64_t count) {
  std::vector<float> input(static_cast<size_t>(count), static_cast<float>(rank));
  std::vector<float> output(input.size(), -1.0f);
  const tfring_tensor tensor{input.data(), output.data(), &count, 1, kFloat32};
  for (int root = 0; root < size; ++root) {
    tfring_error error{};
    const tfring_call call = named(Kind::kReduce, "total", 0, root);
    CHECK(run(ring, call, &tensor, 1, &error) == TFRING_OK, "%s", error.message);
    const float want = rank == root ? static_cast<float>(size * (size - 1) / 2) : -1.0f;
    for (float value : output) CHECK(value == want, "%g", value);
    output.assign(output.size(), -1.0f);
  }
}

// Rank r sends r + d rows, times `rows_each`, to rank d.
void rows_to_each(int rank, int64_t ring, int size, int64_t rows_each) {
  std::vector<int64_t> counts;
  std::vector<int64_t> rows;
  for (int d = 0; d < size; ++d) {
    counts.push_back((rank + d) * rows_each);
    for (int64_t i = 0; i < counts.back(); ++i) rows.push_back(rank * 100 + d);
  }
  struct Result {
    int rank, size;
    int64_t rows_each;
    std::vector<int64_t> rows;
  } result{rank, size, rows_each, {}};
  const auto place = [](void* context, const int64_t* from, int32_t, void** outputs, int32_t* placed) {
    Result& to = *static_cast<Result*>(context);
    int64_t total = 0;
    for (int r = 0; r < to.size; ++r) {
      CHECK(from[r] == (r + to.rank) * to.rows_each, "from rank %d", r);
      total += from[r];
    }
    to.rows.assign(static_cast<size_t>(total), -1);
    outputs[0] = to.rows.data();
    *placed = 1;
  };
  const int64_t dims[1] = {static_cast<int64_t>(rows.size())};
  const tfring_tensor tensor{rows.data(), nullptr, dims, 1, kInt64};
  tfring_error error{};
  const tfring_call call = named(Kind::kAllToAll, "to each");
  CHECK(tfring_run(ring, &call, &tensor, 1, counts.data(), place, &result, &error) == TFRING_OK, "%s",
        error.message);
  size_t at = 0;
  for (int r = 0; r < size; ++r) {
    for (int64_t i = 0; i < (r + rank) * rows_each; ++i)
      CHECK(result.rows[at++] == r * 100 + rank, "rank %d", r);
  }
}

// A half, by a conversion written another way.
double half_value(uint16_t bits) {
  const double sign = (bits & 0x8000) != 0 ? -1.0 : 1.0;
  const int exponent = (bits >> 10) & 31;
  const int mantissa = bits & 1023;
  if (exponent == 31) return mantissa != 0 ? NAN : sign * INFINITY;
  return sign * (exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25));
}

// Rank r has the ids r, r + 1, ..., each twice, and brings the row r + 1 under them, in 7 numbers and in
// halves.
void rows_under_ids(int rank, int64_t ring, int size, int64_t count) {
  std::vector<int64_t> ids;
  for (int64_t i = 0; i < 2 * count; ++i) ids.push_back(rank + i % count);
  std::vector<float> rows(ids.size() * 7, static_cast<float>(rank + 1));
  const std::vector<uint16_t> halves(ids.size(), 0x3c00);  // 1
  const int64_t dims[2] = {2 * count, 7};
  const tfring_tensor tensors[4] = {{rows.data(), nullptr, dims, 2, kFloat32},
                                    {halves.data(), nullptr, dims, 1, kFloat16},
                                    {ids.data(), nullptr, dims, 1, kInt64},
                                    {ids.data(), nullptr, dims, 1, kInt64}};
  struct Result {
    int size;
    std::vector<char> memory[4];
    int64_t numbers[4];
  } result{size, {}, {}};
  const auto place = [](void* context, const int64_t* numbers, int32_t, void** outputs, int32_t* placed) {
    Result& to = *static_cast<Result*>(context);
    constexpr size_t kSizes[4] = {28, 2, 8, 8};
    for (int t = 0; t < 4; ++t) {
      to.numbers[t] = 0;
      for (int r = 0; r < to.size; ++r) to.numbers[t] += numbers[r * 4 + t];
      to.memory[t].resize(static_cast<size_t>(to.numbers[t]) * kSizes[t]);
      outputs[t] = to.memory[t].data();
    }
    *placed = 1;
  };
  for (int way : {0, 5, 6, 0}) {
    tfring_error error{};
    const tfring_call call = named(Kind::kAllReduceRows, "under ids", way);
    CHECK(tfring_run(ring, &call, tensors, 4, nullptr, place, &result, &error) == TFRING_OK, "%s",
          error.message);
    const int64_t different = count == 0 ? 0 : count + size - 1;
    for (int64_t number : result.numbers) CHECK(number == different, "%ld", long(number));
    for (int64_t i = 0; i < different; ++i) {
      int64_t id = 0;
      float row[7];
      uint16_t half = 0;
      std::memcpy(&id, &result.memory[2][static_cast<size_t>(i) * 8], 8);
      std::memcpy(row, &result.memory[0][static_cast<size_t>(i) * 28], 28);
      std::memcpy(&half, &result.memory[1][static_cast<size_t>(i) * 2], 2);
      float want = 0;
      int have = 0;
      for (int r = 0; r < size; ++r) {
        if (id < r || id >= r + count) continue;
        want += 2.0f * static_cast<float>(r + 1);
        ++have;
      }
      for (float value : row) CHECK(value == want, "%g for id %ld, way %d", value, long(id), way);
      CHECK(half_value(half) == 2 * have, "%x for id %ld", half, long(id));
    }
  }
}

// Round the ranks, each passing on what it got.
void pass_on(int rank, int64_t ring, int size, int64_t count) {
  if (size == 1) return;
  std::vector<float> values(static_cast<size_t>(count), 1.0f);
  const auto place = [](void* context, const int64_t* dims, int32_t num_dims, void** outputs,
                        int32_t* placed) {
    auto* to = static_cast<std::vector<float>*>(context);
    CHECK(num_dims == 1 && dims[0] == static_cast<int64_t>(to->size()), "another shape");
    outputs[0] = to->data();
    *placed = 1;
  };
  tfring_error error{};
  const tfring_tensor like{nullptr, nullptr, nullptr, 0, kFloat32};
  const tfring_call from = named(Kind::kReceive, "pass", 0, (rank + size - 1) % size);
  const tfring_call to = named(Kind::kSend, "pass", 0, (rank + 1) % size);
  if (rank > 0)
    CHECK(tfring_run(ring, &from, &like, 1, nullptr, place, &values, &error) == TFRING_OK, "%s",
          error.message);
  for (float& value : values) value += 1.0f;
  const tfring_tensor tensor{values.data(), nullptr, &count, 1, kFloat32};
  CHECK(run(ring, to, &tensor, 1, &error) == TFRING_OK, "%s", error.message);
  if (rank == 0)
    CHECK(tfring_run(ring, &from, &like, 1, nullptr, place, &values, &error) == TFRING_OK, "%s",
          error.message);
  for (float value : values) CHECK(value == (rank == 0 ? size + 1 : rank + 2), "%g", value);
}

// Even and odd ranks by themselves, and then all again.
void in_groups(int rank, int64_t ring, int size) {
  std::vector<int32_t> members;
  for (int r = rank % 2; r < size; r += 2) members.push_back(r);
  tfring_error error{};
  const int64_t group = tfring_group(ring, members.data(), static_cast<int>(members.size()),
                                     rank % 2 == 0 ? "even" : "odd", &error);
  CHECK(group > 0, "%s", error.message);
  const int in_group = static_cast<int>(members.size());
  for (int64_t count : {3, 30000}) {
    reduce_in_pieces(rank / 2, group, in_group, count);
    rows_to_each(rank / 2, group, in_group, count / 3);
    reduce_in_pieces(rank, ring, size, count);
  }
  tfring_close(group);
}

// All 65536 of them.
void halves(int rank, int64_t ring) {
  std::vector<uint16_t> input(65536);
  std::vector<uint16_t> output(65536);
  for (size_t i = 0; i < input.size(); ++i)
    input[i] = rank == 0 ? static_cast<uint16_t>(i) : 0x8000;  // adds -0
  const int64_t dims[1] = {65536};
  const tfring_tensor tensor{input.data(), output.data(), dims, 1, kFloat16};
  tfring_error error{};
  const tfring_call call = named(Kind::kAllReduce, "halves");
  CHECK(run(ring, call, &tensor, 1, &error) == TFRING_OK, "%s", error.message);
  for (size_t i = 0; i < input.size(); ++i) {
    const double want = half_value(static_cast<uint16_t>(i));
    const double got = half_value(output[i]);
    CHECK(std::isnan(want) ? std::isnan(got) : want == got, "%zx became %x", i, output[i]);
  }
}

void everything(int size, bool shared, int algorithm = 0, int num_hosts = 1) {
  World(size, shared, 30, algorithm, num_hosts).run([size](int rank, int64_t ring) {
    tfring_error error{};
    for (int64_t count : {0, 1, 10, 4000, 40000, 150001}) {
      if (size > 8 && count > 10 && count != 40000) continue;
      reduce_in_pieces(rank, ring, size, count);
      gather_uneven(rank, ring, size, count / 20);
      scatter_and_send(rank, ring, size, count / 20);
      total_at_each(rank, ring, size, count);
      rows_to_each(rank, ring, size, count / 20);
      rows_under_ids(rank, ring, size, count / 20);
      pass_on(rank, ring, size, count);
      const tfring_call call = named(Kind::kBarrier, "wait");
      CHECK(run(ring, call, nullptr, 0, &error) == TFRING_OK, "%s", error.message);
    }
    halves(rank, ring);
    in_groups(rank, ring, size);
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
          tfring_reduce_two(dtype, op, at[3], at[0], at[1], n);
          tfring_use_instructions("plain");
          tfring_reduce_two(dtype, op, at[4], at[0], at[1], n);
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
    const tfring_call call = named(Kind::kAllReduce, "odd");
    tfring_error error{};
    CHECK(run(ring, call, &tensor, 1, &error) == TFRING_MISMATCH, "%s", error.message);
    CHECK(std::strstr(error.message, "rank 1 called all_reduce \"odd\" sum float32[9]") != nullptr, "%s",
          error.message);
    CHECK(run(ring, named(Kind::kBarrier, "odd"), nullptr, 0, &error) == TFRING_MISMATCH, "%s",
          error.message);
  });
}

void leaving(int size, bool shared) {
  World(size, shared, 30).run([](int rank, int64_t ring) {
    if (rank == 0) return;
    const tfring_call call = named(Kind::kBarrier, "left");
    tfring_error error{};
    CHECK(run(ring, call, nullptr, 0, &error) == TFRING_PEER_LOST, "%s", error.message);
    CHECK(std::strstr(error.message, "rank 0 left the ring") != nullptr, "%s", error.message);
  });
}

void standing_still(int size, bool shared) {
  std::atomic<int> told{0};
  World(size, shared, 0.3).run([&told, size](int rank, int64_t ring) {
    const tfring_call call = named(Kind::kBarrier, "late");
    tfring_error error{};
    if (rank == 0) {
      while (told < size - 1) usleep(1000);
    } else {
      CHECK(run(ring, call, nullptr, 0, &error) == TFRING_TIMEOUT, "%s", error.message);
      CHECK(std::strstr(error.message, "rank 0 takes no part") != nullptr, "%s", error.message);
      ++told;
    }
  });
}

void closing_meanwhile(int size, bool shared) {
  World(size, shared, 30).run([](int rank, int64_t ring) {
    const tfring_call call = named(Kind::kBarrier, "closed");
    tfring_error error{};
    std::thread closer;
    if (rank == 0) {
      closer = std::thread([ring] {
        usleep(100000);
        tfring_close(ring);
      });
    }
    int code = TFRING_OK;
    for (int i = 0; i < 100000000 && code == TFRING_OK; ++i) code = run(ring, call, nullptr, 0, &error);
    CHECK(code == TFRING_PEER_LOST || code == TFRING_INVALID, "%s", error.message);
    if (closer.joinable()) closer.join();
  });
}

// Then more connections of the watcher are closed, and so ready, than one of its looks returns.
void closing_at_once(int size) {
  std::atomic<int> ready{0};
  World(size, true, 30).run([&ready, size](int, int64_t ring) {
    const tfring_call call = named(Kind::kBarrier, "before");
    tfring_error error{};
    CHECK(run(ring, call, nullptr, 0, &error) == TFRING_OK, "%s", error.message);
    ++ready;
    while (ready < size) usleep(100);
    tfring_close(ring);
  });
}

// Two threads of a rank share one ring; which goes first is the program's matter, so they call the same.
void sharing() {
  World(2, true, 30).run([](int, int64_t ring) {
    const auto body = [ring] {
      const tfring_call call = named(Kind::kBarrier, "shared");
      tfring_error error{};
      for (int i = 0; i < 200; ++i)
        CHECK(run(ring, call, nullptr, 0, &error) == TFRING_OK, "%s", error.message);
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
  tfring::RingState state_of_mine;
  tfring::RingState state_of_theirs;
  state_of_mine.begun = 5;
  state_of_theirs.begun = 3;
  tfring::join_ring(mine, &state_of_mine);
  tfring::join_ring(theirs, &state_of_theirs);
  tfring_set_pool_size(1);
  tfring::Pong pong{};
  pong.num_waiting = 1;
  pong.all_threads_wait = 1;
  pong.waiting[0] = {theirs, 4};
  CHECK(!tfring::wait_for_each_other(pong), "a thread is free");
  tfring::stands_still(mine, true);
  CHECK(tfring::wait_for_each_other(pong),
        "the fourth has not begun here, and no thread is free to begin it");
  pong.waiting[0] = {theirs, 3};
  CHECK(!tfring::wait_for_each_other(pong), "the third has begun here");
  pong.waiting[0] = {3, 1};
  CHECK(!tfring::wait_for_each_other(pong), "this process is not in that ring");
  tfring::Pong told{};
  tfring::notify_waiting(&told);
  CHECK(told.num_waiting == 1 && told.waiting[0].ring == mine && told.waiting[0].begun == 5, "what is told");
  tfring::moves_again(mine, true);
  tfring_set_pool_size(0);
  tfring::leave_ring(&state_of_theirs);
  {
    tfring::RingState another;
    tfring::join_ring(mine, &another);  // of the same name
    tfring::leave_ring(&another);
  }
  pong.waiting[0] = {mine, 6};
  CHECK(tfring::waits_elsewhere(pong) == mine, "the one that is left is looked at");
  tfring::leave_ring(&state_of_mine);
}

// Three ranks, each in a collective with the next, which the next has not begun: a circle, by their reports
// alone; and two ranks in the same collective under two names.
static void comparing_calls() {
  constexpr int kRanks = 3;
  std::vector<tfring::Calls> calls;
  const auto begin = [&calls](int rank, int with, const char* name) {
    tfring::Group group;
    group.ranks = {rank, with};
    const tfring_call call = named(Kind::kBarrier, name);
    const uint64_t sequence = calls[static_cast<size_t>(rank)].count(Kind::kBarrier, 0, &group);
    calls[static_cast<size_t>(rank)].begin(tfring::make_header(group, call, nullptr, 0, sequence));
  };
  const auto of = [&calls](int rank) -> tfring::Calls& { return calls[static_cast<size_t>(rank)]; };
  const auto report = [&](int from, int to) {
    tfring::Report report;
    report.begun = of(from).common(to);
    of(from).tell(to, of(to).asked_number(from), &report.pong);
    return report;
  };
  for (int r = 0; r < kRanks; ++r) calls.emplace_back(r, kRanks);
  for (int r = 0; r < kRanks; ++r) begin(r, (r + 1) % kRanks, "crossed");
  CHECK(!of(0).has_begun(1, report(1, 0)), "rank 1 is in a call with rank 2");
  CHECK(of(1).follow(2, report(2, 1)).empty(), "rank 2 has not told yet for whom it waits");
  CHECK(of(0).follow(1, report(1, 0)).empty(), "rank 1 has told of rank 2 only");
  const std::string circle = of(2).follow(0, report(0, 2));
  CHECK(circle == "rank 2 waits for rank 0, rank 0 for rank 1, rank 1 for rank 2", "%s", circle.c_str());
  of(0).end();
  CHECK(of(2).follow(0, report(0, 2)).empty(), "rank 0 is in no call");

  calls.clear();
  for (int r = 0; r < kRanks; ++r) calls.emplace_back(r, kRanks);
  begin(0, 1, "one");
  begin(1, 0, "one");
  CHECK(of(0).has_begun(1, report(1, 0)) && of(0).contradiction(1, report(1, 0)) == nullptr, "they agree");
  begin(0, 1, "one");
  begin(1, 0, "another");
  const tfring::Report theirs = report(1, 0);
  const tfring::CallHeader* other = of(0).contradiction(1, theirs);
  CHECK(other != nullptr && std::strcmp(other->name, "another") == 0, "the second has another name");
  of(1).end();
  begin(1, 2, "with rank 2");
  const tfring::Report later = report(1, 0);
  other = of(0).contradiction(1, later);
  CHECK(other != nullptr && std::strcmp(other->name, "another") == 0, "rank 1 is through with it");
}

// A group's call where the others call another's: named, on every rank.
static void crossed_groups(bool shared) {
  World(3, shared, 30).run([](int rank, int64_t ring) {
    tfring_error error{};
    const int32_t pair[2] = {0, 1};
    const int64_t group = tfring_group(ring, pair, 2, "pair", &error);
    CHECK(group > 0, "%s", error.message);
    const tfring_call call = named(Kind::kBarrier, "crossed");
    const int code = rank == 0 ? run(group, call, nullptr, 0, &error) : run(ring, call, nullptr, 0, &error);
    CHECK(code == TFRING_MISMATCH, "%s", error.message);
    CHECK(std::strstr(error.message, "of group \"pair\"") != nullptr, "%s", error.message);
    tfring_close(group);
  });
}

// A thread that claims the call that another thread is in: both fail, though all bytes have arrived.
static void contending_threads(bool shared) {
  World(2, shared, 30).run([](int rank, int64_t ring) {
    struct Result {
      int64_t ring;
      bool contends;
      std::vector<float> values;
    } result{ring, rank == 0, {}};
    const auto place = [](void* context, const int64_t* rows, int32_t, void** outputs, int32_t* placed) {
      Result* into = static_cast<Result*>(context);
      into->values.resize(static_cast<size_t>(rows[0] + rows[1]));
      outputs[0] = into->values.data();
      *placed = 1;
      if (!into->contends) return;
      std::thread([into] {
        tfring_error error{};
        float value = 0;
        const int64_t dims[1] = {1};
        const tfring_tensor tensor{&value, &value, dims, 1, kFloat32};
        const tfring_call call = named(Kind::kAllReduce, "contended");
        const int code = run(into->ring, call, &tensor, 1, &error);
        CHECK(code == TFRING_MISMATCH, "%s", error.message);
      }).join();
    };
    tfring_error error{};
    const tfring_call call = named(Kind::kAllGather, "contended");
    float row = static_cast<float>(rank);
    const int64_t dims[1] = {1};
    const tfring_tensor tensor{&row, nullptr, dims, 1, kFloat32};
    const int code = tfring_run(ring, &call, &tensor, 1, nullptr, place, &result, &error);
    if (rank == 1 && code == TFRING_OK) return;  // it was through before
    CHECK(code == TFRING_MISMATCH, "%s", error.message);
    CHECK(std::strstr(error.message, "two threads of rank 0") != nullptr, "%s", error.message);
  });
}

// Takes what the scenarios leave in a trace, while they leave it. Of some there is no room.
void take_records(const std::atomic<bool>* over) {
  std::vector<tfring_record> taken(64);
  int64_t all = 0;
  int64_t lost = 0;
  while (!*over) {
    const int64_t count = tfring_take_records(taken.data(), 64, &lost);
    for (int64_t i = 0; i < count; ++i) {
      const tfring_record& record = taken[static_cast<size_t>(i)];
      const int64_t took = record.end - record.begin;
      CHECK(record.waited >= 0 && record.added >= 0 && record.waited + record.added <= took, "%s",
            record.name);
    }
    all += count;
    usleep(1000);
  }
  CHECK(all > 100, "%ld records", long(all));
}

// `driver LIBRARY`: also over connections that this OpenSSL encrypts.
int main(int argc, char** argv) {
  tfring_trace(64);
  std::atomic<bool> over{false};
  std::thread taker(take_records, &over);
  arithmetic();
  for (bool shared : {false, true}) {
    for (int size : {1, 2, 3, 5}) everything(size, shared);
    everything(5, shared, 2);     // Bruck
    everything(6, shared, 0, 3);  // two levels
    everything(18, shared);       // more than are flat
    crossed_groups(shared);
    contending_threads(shared);
    for (int size : {2, 4}) {
      disagreement(size, shared);
      leaving(size, shared);
      standing_still(size, shared);
      closing_meanwhile(size, shared);
    }
  }
  tls_library = argc > 1 ? argv[1] : nullptr;
  if (tls_library != nullptr) {
    for (int size : {2, 3, 5}) everything(size, false);
    contending_threads(false);
    disagreement(2, false);
    leaving(4, false);
    standing_still(4, false);
    closing_meanwhile(4, false);
  }
  for (int i = 0; i < 5; ++i) closing_at_once(24);
  sharing();
  waiting_for_each_other();
  comparing_calls();
  over = true;
  taker.join();
  std::puts("every scenario passed");
  return 0;
}
