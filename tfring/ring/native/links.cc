// Opening links: shared memory if both ranks are on one host, otherwise a TCP connection.
#include "links.h"

#include <string>

namespace tfring {
namespace {

std::unique_ptr<Mailbox> map(int memory_fd, int doorbell_fd, bool* mapped) {
  if (memory_fd < 0) return nullptr;
  std::unique_ptr<Mailbox> mailbox = Mailbox::open(memory_fd, doorbell_fd);
  *mapped = *mapped && mailbox != nullptr;
  return mailbox;
}

}  // namespace

Status Link::open(const tfring_link& from, int this_rank, std::unique_ptr<Link>* link) {
  auto opened = std::make_unique<Link>();
  opened->rank = from.rank;
  opened->data_fd = Fd(from.data_fd);
  opened->tls.reset(static_cast<Tls*>(from.tls));
  bool mapped = true;
  opened->own = map(from.own_mailbox_fd, from.own_doorbell_fd, &mapped);
  opened->peers = map(from.mailbox_fd, from.doorbell_fd, &mapped);
  if (!mapped) {
    return {Code::kInternal, "rank " + std::to_string(this_rank) + " could not map shared memory"};
  }
  if (opened->own != nullptr) {
    opened->sender = make_shm_sender(opened->peers.get());
    opened->receiver = make_shm_receiver(opened->own.get(), opened->peers.get());
  } else {
    opened->sender = make_tcp_sender(opened->data_fd.get(), opened->tls.get());
    opened->receiver = make_tcp_receiver(opened->data_fd.get(), opened->tls.get());
  }
  *link = std::move(opened);
  return {};
}

void Links::close() {
  for (auto& link : links_) link.reset();
}

}  // namespace tfring
