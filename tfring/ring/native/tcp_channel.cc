// Data over a TCP connection.
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "channel.h"
#include "tls.h"

namespace tfring {
namespace {

// Large enough to save system calls, small enough to stay in the cache between the kernel's copy and the
// addition.
constexpr int64_t kWindowBytes = 256 * 1024;

// Data in flight between two ranks of a host should stay in the cache from one copy to the other. Over a
// network the kernel finds the size that fills the line.
constexpr int kLocalSendBufferBytes = 128 * 1024;  // the kernel doubles it

bool is_local(int fd) {
  sockaddr_storage here{};
  sockaddr_storage there{};
  socklen_t here_size = sizeof(here);
  socklen_t there_size = sizeof(there);
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&here), &here_size) != 0) return false;
  if (getpeername(fd, reinterpret_cast<sockaddr*>(&there), &there_size) != 0) return false;
  if (here.ss_family != there.ss_family) return false;
  if (here.ss_family == AF_INET) {
    return reinterpret_cast<sockaddr_in*>(&here)->sin_addr.s_addr ==
           reinterpret_cast<sockaddr_in*>(&there)->sin_addr.s_addr;
  }
  return here.ss_family == AF_INET6 &&
         std::memcmp(&reinterpret_cast<sockaddr_in6*>(&here)->sin6_addr,
                     &reinterpret_cast<sockaddr_in6*>(&there)->sin6_addr, sizeof(in6_addr)) == 0;
}

// Keeps devices on the way from dropping a connection without traffic, such as during an evaluation of an
// hour on one rank. The control connection determines whether the peer is alive.
void keep_known(int fd) {
  const int on = 1;
  const int seconds = 60;
  setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &seconds, sizeof(seconds));
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &seconds, sizeof(seconds));
}

bool would_block(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }

class TcpSender final : public Sender {
 public:
  TcpSender(int fd, Tls* tls) : fd_(fd), tls_(tls) {
    fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
    keep_known(fd);
    if (is_local(fd)) {
      setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &kLocalSendBufferBytes, sizeof(kLocalSendBufferBytes));
    }
  }

  int64_t send(const iovec* parts, int num_parts) override {
    if (tls_ != nullptr) return tls_->send(parts, num_parts);
    msghdr message{};
    message.msg_iov = const_cast<iovec*>(parts);
    message.msg_iovlen = static_cast<size_t>(num_parts);
    const ssize_t sent = sendmsg(fd_, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent >= 0) return sent;
    return would_block(errno) ? 0 : kGone;
  }

  bool ready() const override { return false; }
  int poll_fd() const override { return fd_; }

 private:
  const int fd_;
  Tls* const tls_;
};

class TcpReceiver final : public Receiver {
 public:
  TcpReceiver(int fd, Tls* tls) : fd_(fd), tls_(tls), window_(kWindowBytes) {
    fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
    keep_known(fd);
  }

  int64_t peek(int64_t wanted, const char** data) override {
    if (end_ - begin_ < wanted) {
      std::memmove(window_.data(), window_.data() + begin_, static_cast<size_t>(end_ - begin_));
      end_ -= begin_;
      begin_ = 0;
      iovec rest{window_.data() + end_, static_cast<size_t>(kWindowBytes - end_)};
      const int64_t got = receive_now(&rest, 1);
      if (got < 0) return got;
      end_ += got;
    }
    *data = window_.data() + begin_;
    return end_ - begin_;
  }

  void consume(int64_t num_bytes) override { begin_ += num_bytes; }

  int64_t receive(const iovec* parts, int num_parts) override {
    if (begin_ == end_) return receive_now(parts, num_parts);
    int64_t moved = 0;
    for (int i = 0; i < num_parts && begin_ < end_; ++i) {
      const int64_t size = std::min<int64_t>(static_cast<int64_t>(parts[i].iov_len), end_ - begin_);
      std::memcpy(parts[i].iov_base, window_.data() + begin_, static_cast<size_t>(size));
      begin_ += size;
      moved += size;
    }
    return moved;
  }

  bool ready(int64_t wanted) const override { return end_ - begin_ >= wanted; }
  int poll_fd() const override { return fd_; }

 private:
  int64_t receive_now(const iovec* parts, int num_parts) {
    if (tls_ != nullptr) return tls_->receive(parts, num_parts);
    msghdr message{};
    message.msg_iov = const_cast<iovec*>(parts);
    message.msg_iovlen = static_cast<size_t>(num_parts);
    const ssize_t got = recvmsg(fd_, &message, MSG_DONTWAIT);
    if (got > 0) return got;
    return got < 0 && would_block(errno) ? 0 : kGone;
  }

  const int fd_;
  Tls* const tls_;
  std::vector<char> window_;
  int64_t begin_ = 0;
  int64_t end_ = 0;
};

}  // namespace

std::unique_ptr<Sender> make_tcp_sender(int fd, Tls* tls) { return std::make_unique<TcpSender>(fd, tls); }
std::unique_ptr<Receiver> make_tcp_receiver(int fd, Tls* tls) {
  return std::make_unique<TcpReceiver>(fd, tls);
}

}  // namespace tfring
