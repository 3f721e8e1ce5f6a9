// Data through memory that two ranks of a host share.
//
// Each of the two owns a mailbox: an anonymous memory file with one ring of bytes, written by the peer and
// read by the owner. The bytes are mapped twice in a row, so that all readable bytes, and all free ones, are
// contiguous.
//
//     page 0: MailboxHeader | bytes | the same bytes again
//
// An idle rank marks itself asleep in its own mailboxes and polls their doorbells, which are pipes. A rank
// that writes bytes into a mailbox, or reads bytes from one, rings the doorbell of the rank on the other side
// if it is asleep. None of this has a name in the file system, so nothing is left behind, however the process
// ends.
#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "channel.h"

namespace tfring {

// The first page of a mailbox. Each counter has its own cache line.
//
// Sleeping and ringing are a Dekker handshake: the sleeper sets `asleep` and then reads the counters, the
// other side changes a counter and then reads `asleep`. All of this is sequentially consistent, so that at
// least one sees the change of the other.
struct MailboxHeader {
  alignas(64) std::atomic<uint64_t> written;  // bytes written so far, by the peer
  alignas(64) std::atomic<uint64_t> read;     // bytes read so far, by the owner
  alignas(64) std::atomic<uint32_t> asleep;   // 1 while the owner waits for its doorbell
};
static_assert(std::atomic<uint64_t>::is_always_lock_free, "counters shared between processes");
static_assert(sizeof(MailboxHeader) <= kMailboxHeaderBytes, "the header fits its page");

Mailbox::Mailbox(MailboxHeader* header, char* bytes, int64_t capacity, int doorbell_fd)
    : header_(header), bytes_(bytes), capacity_(capacity), doorbell_fd_(doorbell_fd) {}

Mailbox::~Mailbox() { munmap(header_, static_cast<size_t>(kMailboxHeaderBytes + 2 * capacity_)); }

std::unique_ptr<Mailbox> Mailbox::open(int memory_fd, int doorbell_fd) {
  struct stat facts;
  int64_t capacity = -1;
  if (fstat(memory_fd, &facts) == 0) capacity = facts.st_size - kMailboxHeaderBytes;
  void* base = MAP_FAILED;
  if (capacity > 0) {
    // Reserve the full range first, then map the file into it.
    const size_t total = static_cast<size_t>(kMailboxHeaderBytes + 2 * capacity);
    base = mmap(nullptr, total, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base != MAP_FAILED) {
      const auto lay = [&](int64_t at, int64_t size, int64_t offset) {
        return mmap(static_cast<char*>(base) + at, static_cast<size_t>(size), PROT_READ | PROT_WRITE,
                    MAP_SHARED | MAP_FIXED, memory_fd, offset) != MAP_FAILED;
      };
      if (!lay(0, kMailboxHeaderBytes + capacity, 0) ||
          !lay(kMailboxHeaderBytes + capacity, capacity, kMailboxHeaderBytes)) {
        munmap(base, total);
        base = MAP_FAILED;
      } else {
        madvise(base, total, MADV_DONTFORK);
      }
    }
  }
  close(memory_fd);
  if (base == MAP_FAILED) {
    close(doorbell_fd);
    return nullptr;
  }
  char* first = static_cast<char*>(base);
  return std::unique_ptr<Mailbox>(
      new Mailbox(static_cast<MailboxHeader*>(base), first + kMailboxHeaderBytes, capacity, doorbell_fd));
}

void Mailbox::ring_if_asleep() {
  if (header_->asleep.load() == 0 || header_->asleep.exchange(0) == 0) return;
  const char bell = 1;
  const ssize_t written = write(doorbell_fd_.get(), &bell, 1);
  (void)written;  // a full pipe has rung already; a closed one is a dead rank's, as its control shows
}

void Mailbox::fall_asleep() { header_->asleep.store(1); }

void Mailbox::wake_up() { header_->asleep.store(0); }

void Mailbox::silence_doorbell() {
  char bells[64];
  while (::read(doorbell_fd_.get(), bells, sizeof(bells)) == static_cast<ssize_t>(sizeof(bells))) {
  }
}

// The peer can write the counters as well: whatever they hold, no memory beyond the mailbox is accessed.
int64_t Mailbox::readable() const {
  const uint64_t written = header_->written.load();
  return std::clamp<int64_t>(static_cast<int64_t>(written - header_->read.load(std::memory_order_relaxed)), 0,
                             capacity_);
}

int64_t Mailbox::writable() const {
  const uint64_t written = header_->written.load(std::memory_order_relaxed);
  return capacity_ - std::clamp<int64_t>(static_cast<int64_t>(written - header_->read.load()), 0, capacity_);
}

char* Mailbox::write_position() const {
  return bytes_ + header_->written.load(std::memory_order_relaxed) % static_cast<uint64_t>(capacity_);
}

const char* Mailbox::read_position() const {
  return bytes_ + header_->read.load(std::memory_order_relaxed) % static_cast<uint64_t>(capacity_);
}

void Mailbox::did_write(int64_t num_bytes) {
  header_->written.store(header_->written.load(std::memory_order_relaxed) + static_cast<uint64_t>(num_bytes));
}

void Mailbox::did_read(int64_t num_bytes) {
  header_->read.store(header_->read.load(std::memory_order_relaxed) + static_cast<uint64_t>(num_bytes));
}

namespace {

constexpr int64_t kStreamFromBytes = 16 * 1024;

#if defined(__SSE2__)
void stream(char* to, const char* from, int64_t size) {
  const int64_t head = -reinterpret_cast<intptr_t>(to) & 63;  // up to a full cache line
  std::memcpy(to, from, static_cast<size_t>(head));
  int64_t at = head;
  for (; at + 64 <= size; at += 64) {
    __m128i line[4];
    std::memcpy(line, from + at, sizeof(line));
    for (int i = 0; i < 4; ++i) _mm_stream_si128(reinterpret_cast<__m128i*>(to + at) + i, line[i]);
  }
  _mm_sfence();
  std::memcpy(to + at, from + at, static_cast<size_t>(size - at));
}
#else
void stream(char* to, const char* from, int64_t size) { std::memcpy(to, from, static_cast<size_t>(size)); }
#endif

// Decides whether large blocks are written past the cache. If the two cores share a cache, this costs a
// third. If they do not (two chiplets, two sockets), data that one has written into its cache reaches the
// other at a third of the speed of memory. This cannot be queried, and changes when the scheduler moves a
// process. So both ways are tried, on the same collectives on every rank, and the better one is kept until a
// trial shows otherwise.
class StreamingChoice {
 public:
  bool streams() const { return streams_; }

  void learn(double seconds) {
    double& best = seconds_[streams_ ? 1 : 0];
    best = best == 0 ? seconds : std::min(seconds, best * kForget);
    ++num_learned_;
    const bool better = seconds_[1] <= seconds_[0];
    streams_ = num_learned_ < kFirstTrials ? num_learned_ % 2 == 0 : better;
    if (num_learned_ % kTrialEvery == 0) streams_ = !better;
  }

 private:
  static constexpr int kFirstTrials = 6;
  static constexpr int kTrialEvery = 32;
  static constexpr double kForget = 1.1;  // so that an old best time does not count forever

  bool streams_ = true;
  int num_learned_ = 0;
  double seconds_[2] = {0, 0};  // per byte: through the cache, past it
};

class ShmSender final : public Sender {
 public:
  explicit ShmSender(Mailbox* peers) : peers_(peers) {}

  int64_t send(const iovec* parts, int num_parts) override {
    const int64_t room = peers_->writable();
    if (room == 0) return 0;
    char* to = peers_->write_position();
    int64_t taken = 0;
    for (int i = 0; i < num_parts && taken < room; ++i) {
      const int64_t size = std::min<int64_t>(static_cast<int64_t>(parts[i].iov_len), room - taken);
      const char* from = static_cast<const char*>(parts[i].iov_base);
      if (size >= kStreamFromBytes && choice_.streams()) {
        stream(to + taken, from, size);
      } else {
        std::memcpy(to + taken, from, static_cast<size_t>(size));
      }
      taken += size;
    }
    peers_->did_write(taken);
    peers_->ring_if_asleep();
    return taken;
  }

  bool ready() const override { return peers_->writable() > 0; }
  int poll_fd() const override { return -1; }
  void learn(double seconds) override { choice_.learn(seconds); }

 private:
  Mailbox* const peers_;
  StreamingChoice choice_;
};

class ShmReceiver final : public Receiver {
 public:
  ShmReceiver(Mailbox* own, Mailbox* peers) : own_(own), peers_(peers) {}

  int64_t peek(int64_t, const char** data) override {
    *data = own_->read_position();
    return own_->readable();
  }

  // The writer sleeps only when the mailbox is full, and is woken when half of it is free, not for every few
  // bytes.
  void consume(int64_t num_bytes) override {
    own_->did_read(num_bytes);
    if (2 * own_->readable() <= own_->capacity()) peers_->ring_if_asleep();
  }

  int64_t receive(const iovec* parts, int num_parts) override {
    const int64_t available = own_->readable();
    if (available == 0) return 0;
    const char* from = own_->read_position();
    int64_t moved = 0;
    for (int i = 0; i < num_parts && moved < available; ++i) {
      const int64_t size = std::min<int64_t>(static_cast<int64_t>(parts[i].iov_len), available - moved);
      std::memcpy(parts[i].iov_base, from + moved, static_cast<size_t>(size));
      moved += size;
    }
    consume(moved);
    return moved;
  }

  bool ready(int64_t wanted) const override { return own_->readable() >= wanted; }
  int poll_fd() const override { return -1; }

 private:
  Mailbox* const own_;
  Mailbox* const peers_;
};

}  // namespace

std::unique_ptr<Sender> make_shm_sender(Mailbox* peers) { return std::make_unique<ShmSender>(peers); }
std::unique_ptr<Receiver> make_shm_receiver(Mailbox* own, Mailbox* peers) {
  return std::make_unique<ShmReceiver>(own, peers);
}

}  // namespace tfring
