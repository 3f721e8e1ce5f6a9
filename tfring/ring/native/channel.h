// One direction of data between two ranks: never blocks, knows no collectives.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <memory>

#include "fd.h"

namespace tfring {

constexpr int64_t kGone = -1;     // the peer closed its end, or died
constexpr int64_t kGarbled = -2;  // the received data is not what the peer encrypted

class Tls;

class Sender {
 public:
  virtual ~Sender() = default;
  // Sends as many bytes from the front as there is room for now. Returns their number, kGone or kGarbled. The
  // next call must begin with the bytes that were not sent.
  virtual int64_t send(const iovec* parts, int num_parts) = 0;
  // Returns whether there is room, as far as this is known without asking the kernel.
  virtual bool ready() const = 0;
  // Returns the descriptor to poll for room, or -1 if the doorbell rings instead.
  virtual int poll_fd() const = 0;
  // Receives the duration of a large collective from its first byte.
  virtual void learn(double) {}
};

class Receiver {
 public:
  virtual ~Receiver() = default;
  // Shows received bytes in place. Returns the number of bytes at *data (fewer than `wanted` if the rest has
  // not arrived yet), kGone or kGarbled.
  virtual int64_t peek(int64_t wanted, const char** data) = 0;
  virtual void consume(int64_t num_bytes) = 0;
  // Moves received bytes out. Returns their number, kGone or kGarbled.
  virtual int64_t receive(const iovec* parts, int num_parts) = 0;
  virtual bool ready(int64_t wanted) const = 0;
  virtual int poll_fd() const = 0;
};

// The descriptor must outlive both, as must `tls`, which is null if the data is not encrypted.
std::unique_ptr<Sender> make_tcp_sender(int fd, Tls* tls);
std::unique_ptr<Receiver> make_tcp_receiver(int fd, Tls* tls);

constexpr int64_t kMailboxHeaderBytes = 4096;
struct MailboxHeader;

// One of the two mailboxes of a link, seen by its owner or by the peer; see shm_channel.cc.
class Mailbox {
 public:
  // Takes over both descriptors. Returns null if the memory cannot be mapped.
  static std::unique_ptr<Mailbox> open(int memory_fd, int doorbell_fd);
  ~Mailbox();
  Mailbox(const Mailbox&) = delete;
  Mailbox& operator=(const Mailbox&) = delete;

  // For the owner. Between the two calls it must check again that there is nothing to do, then poll
  // doorbell_fd.
  void fall_asleep();
  void wake_up();
  void silence_doorbell();
  int doorbell_fd() const { return doorbell_fd_.get(); }
  // For the peer, after it has changed anything that the owner may wait for.
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

// The mailboxes must outlive both.
std::unique_ptr<Sender> make_shm_sender(Mailbox* peers);
std::unique_ptr<Receiver> make_shm_receiver(Mailbox* own, Mailbox* peers);

}  // namespace tfring
