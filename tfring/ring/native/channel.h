// One direction of data between two ranks: never blocks, knows no collectives.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <memory>

#include "fd.h"

namespace tfring {

constexpr int64_t kGone = -1;     // the peer closed its end, or died
constexpr int64_t kGarbled = -2;  // what comes is not what the peer encrypted

class Tls;

class Sender {
 public:
  virtual ~Sender() = default;
  // Takes as many bytes as there is room for now, from the front. Returns their number, kGone or kGarbled.
  // Those that it does not take are the first of the next call.
  virtual int64_t send(const iovec* parts, int num_parts) = 0;
  // Returns whether there is room, as far as this is known without asking the kernel.
  virtual bool ready() const = 0;
  // Returns the descriptor to poll for room, or -1 where the doorbell rings.
  virtual int poll_fd() const = 0;
  // Gets how long a large collective took from its first byte on.
  virtual void learn(double) {}
};

class Receiver {
 public:
  virtual ~Receiver() = default;
  // Shows received bytes in place. Returns how many follow at *data (fewer than `wanted`: the rest is still
  // on its way), kGone or kGarbled.
  virtual int64_t peek(int64_t wanted, const char** data) = 0;
  virtual void consume(int64_t num_bytes) = 0;
  // Moves received bytes out. Returns their number, kGone or kGarbled.
  virtual int64_t receive(const iovec* parts, int num_parts) = 0;
  virtual bool ready(int64_t wanted) const = 0;
  virtual int poll_fd() const = 0;
};

// The descriptor outlives both, and so does `tls`, which is null where the data is not encrypted.
std::unique_ptr<Sender> make_tcp_sender(int fd, Tls* tls);
std::unique_ptr<Receiver> make_tcp_receiver(int fd, Tls* tls);

constexpr int64_t kMailboxHeaderBytes = 4096;
struct MailboxHeader;

// One of the two mailboxes of a link, seen by its owner or by the peer; see shm_channel.cc.
class Mailbox {
 public:
  // Takes over both descriptors. Null where the memory cannot be mapped.
  static std::unique_ptr<Mailbox> open(int memory_fd, int doorbell_fd);
  ~Mailbox();
  Mailbox(const Mailbox&) = delete;
  Mailbox& operator=(const Mailbox&) = delete;

  // The owner: between the two, look again whether there is really nothing to do, then poll doorbell_fd.
  void fall_asleep();
  void wake_up();
  void silence_doorbell();
  int doorbell_fd() const { return doorbell_fd_.get(); }
  // The peer, after changing something the owner may wait for.
  void ring_if_asleep();

  int64_t capacity() const { return capacity_; }
  int64_t readable() const;
  int64_t writable() const;
  const char* read_position() const;
  char* write_position() const;
  void did_read(int64_t num_bytes);
  void did_write(int64_t num_bytes);

 private:
  Mailbox(MailboxHeader* header, char* bytes, int64_t capacity, int doorbell_fd);

  MailboxHeader* const header_;
  char* const bytes_;
  const int64_t capacity_;
  const Fd doorbell_fd_;
};

// The mailboxes outlive both.
std::unique_ptr<Sender> make_shm_sender(Mailbox* peers);
std::unique_ptr<Receiver> make_shm_receiver(Mailbox* own, Mailbox* peers);

}  // namespace tfring
