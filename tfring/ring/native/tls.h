// TLS 1.3 over a connection for data, by an OpenSSL that the process has.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <memory>

#include "status.h"

namespace tfring {

constexpr int kTlsKeyBytes = 32;

// One end of an encrypted connection; belongs to the call under way, as its Link does.
class Tls {
 public:
  // Agrees with the peer on the keys of this connection. Both prove that they know `key` (a pre-shared key,
  // with an ephemeral Diffie-Hellman exchange: what was recorded stays secret if the key becomes known).
  // `library` is a file that has the functions of OpenSSL 3 or 1.1.1, or links to one.
  static Status open(const char* library, int fd, bool accepts, const unsigned char* key, double seconds,
                     std::unique_ptr<Tls>* tls);
  virtual ~Tls() = default;

  // As Sender::send and Receiver::receive: never block. Bytes count as sent once the kernel has them, so that
  // none wait in here when a collective ends.
  virtual int64_t send(const iovec* parts, int num_parts) = 0;
  virtual int64_t receive(const iovec* parts, int num_parts) = 0;
};

}  // namespace tfring
