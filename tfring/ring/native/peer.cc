// Sending to a peer, as far as its connection has room, and acknowledgements of its kernel.
#include "peer.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>

#include "watcher.h"

namespace tfring {
namespace {

// Makes the kernel give up a control connection when sent data is not acknowledged, and probe it while it is
// silent, before the watcher's pings begin. This is not done for data connections: a slow rank that reads no
// data for minutes would be a lost one for TCP_USER_TIMEOUT.
void prepare_control(int fd, double lost_seconds) {
  fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
  const int on = 1;
  const unsigned int milliseconds = static_cast<unsigned int>(std::min(lost_seconds * 1e3, 1e9));
  const int probe_seconds = static_cast<int>(std::min(std::max(lost_seconds / 3, 1.0), 3600.0));
  const int num_probes = 3;
  setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &probe_seconds, sizeof(probe_seconds));
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &probe_seconds, sizeof(probe_seconds));
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &num_probes, sizeof(num_probes));
  setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &milliseconds, sizeof(milliseconds));
}

}  // namespace

Peer::Peer(const tfring_link& link, double lost_seconds)
    : rank(link.rank), host(link.host), control_fd(link.control_fd) {
  prepare_control(link.control_fd, lost_seconds);
}

void Peer::send(const ControlFrame& sent_frame) {
  if (control_fd.get() < 0) return;
  const auto type = static_cast<ControlType>(sent_frame.type);
  const bool is_news = type != ControlType::kPing && type != ControlType::kPong;
  if (!is_news && unsent.size() > kMostUnanswered * sizeof(sent_frame)) return;
  const char* bytes = reinterpret_cast<const char*>(&sent_frame);
  if (!unsent.empty()) {
    unsent.append(bytes, sizeof(sent_frame));
    return;
  }
  const size_t sent = send_now(bytes, sizeof(sent_frame));
  if (sent == sizeof(sent_frame)) return;
  unsent.assign(bytes + sent, sizeof(sent_frame) - sent);
  wake_watcher();  // it polls for room from now on
}

void Peer::send_unsent() { unsent.erase(0, send_now(unsent.data(), unsent.size())); }

// Returns the number of bytes that no longer need to be sent.
size_t Peer::send_now(const char* bytes, size_t size) const {
  size_t sent = 0;
  while (sent < size) {
    const ssize_t got = ::send(control_fd.get(), bytes + sent, size - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return sent;
    if (got < 0) return size;  // a peer that is gone needs no frames
    sent += static_cast<size_t>(got);
  }
  return sent;
}

bool Peer::is_acknowledged() const {
  tcp_info facts{};
  socklen_t size = sizeof(facts);
  if (getsockopt(control_fd.get(), IPPROTO_TCP, TCP_INFO, &facts, &size) != 0)
    return true;  // not a network connection
  int left = 0;
  return ioctl(control_fd.get(), SIOCOUTQ, &left) == 0 ? left == 0 : facts.tcpi_unacked == 0;
}

}  // namespace tfring
