// TLS 1.3 over a data connection.
#include "tls.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "channel.h"
#include "clock.h"

// Declared as in OpenSSL's headers, which need not be installed to compile this.
extern "C" {
typedef struct ssl_st SSL;
typedef struct ssl_ctx_st SSL_CTX;
typedef struct ssl_method_st SSL_METHOD;
typedef struct bio_st BIO;
typedef struct bio_method_st BIO_METHOD;
}

namespace tfring {
namespace {

using PskClient = unsigned int (*)(SSL*, const char*, char*, unsigned int, unsigned char*, unsigned int);
using PskServer = unsigned int (*)(SSL*, const char*, unsigned char*, unsigned int);

struct OpenSsl {
  const SSL_METHOD* (*TLS_method)();
  SSL_CTX* (*SSL_CTX_new)(const SSL_METHOD*);
  void (*SSL_CTX_free)(SSL_CTX*);
  long (*SSL_CTX_ctrl)(SSL_CTX*, int, long, void*);
  int (*SSL_CTX_set_ciphersuites)(SSL_CTX*, const char*);
  int (*SSL_CTX_set_num_tickets)(SSL_CTX*, size_t);
  void (*SSL_CTX_set_verify)(SSL_CTX*, int, void*);
  void (*SSL_CTX_set_default_read_buffer_len)(SSL_CTX*, size_t);
  void (*SSL_CTX_set_psk_client_callback)(SSL_CTX*, PskClient);
  void (*SSL_CTX_set_psk_server_callback)(SSL_CTX*, PskServer);
  SSL* (*SSL_new)(SSL_CTX*);
  void (*SSL_free)(SSL*);
  int (*SSL_set_ex_data)(SSL*, int, void*);
  void* (*SSL_get_ex_data)(const SSL*, int);
  void (*SSL_set_read_ahead)(SSL*, int);
  void (*SSL_set_bio)(SSL*, BIO*, BIO*);
  void (*SSL_set_accept_state)(SSL*);
  void (*SSL_set_connect_state)(SSL*);
  int (*SSL_do_handshake)(SSL*);
  int (*SSL_session_reused)(const SSL*);
  int (*SSL_get_error)(const SSL*, int);
  int (*SSL_read)(SSL*, void*, int);
  int (*SSL_write)(SSL*, const void*, int);
  int (*SSL_key_update)(SSL*, int);
  BIO_METHOD* (*BIO_meth_new)(int, const char*);
  int (*BIO_meth_set_write)(BIO_METHOD*, int (*)(BIO*, const char*, int));
  int (*BIO_meth_set_read)(BIO_METHOD*, int (*)(BIO*, char*, int));
  int (*BIO_meth_set_ctrl)(BIO_METHOD*, long (*)(BIO*, int, long, void*));
  BIO* (*BIO_new)(const BIO_METHOD*);
  void (*BIO_set_data)(BIO*, void*);
  void* (*BIO_get_data)(BIO*);
  void (*BIO_set_init)(BIO*, int);
  void (*BIO_set_flags)(BIO*, int);
  void (*BIO_clear_flags)(BIO*, int);
  unsigned long (*ERR_get_error)();
  void (*ERR_error_string_n)(unsigned long, char*, size_t);
  void (*ERR_clear_error)();
};

// Constants of OpenSSL's headers, unchanged since version 1.1.1.
constexpr int kSetMinVersion = 123;  // SSL_CTRL_SET_MIN_PROTO_VERSION
constexpr long kTls13 = 0x0304;      // TLS1_3_VERSION
constexpr int kVerifyPeer = 1;       // SSL_VERIFY_PEER
constexpr int kWantRead = 2;         // SSL_ERROR_WANT_READ
constexpr int kWantWrite = 3;        // SSL_ERROR_WANT_WRITE
constexpr int kNotRequested = 0;     // SSL_KEY_UPDATE_NOT_REQUESTED
constexpr int kSourceSink = 0x0400;  // BIO_TYPE_SOURCE_SINK
constexpr int kFlush = 11;           // BIO_CTRL_FLUSH
constexpr int kRetryRead = 0x01 | 0x08;
constexpr int kRetry = 0x0f;

constexpr char kIdentity[] = "tfring";
constexpr int64_t kRecordBytes = 16384;                 // most data in one record
constexpr int64_t kRecordOverhead = 256;                // most additional bytes of a record (RFC 8446, 5.2)
constexpr int64_t kUnsentBytes = 320 * 1024;            // encrypted at a time
constexpr int64_t kRecordsOfAKey = 1 << 23;             // 2^24.5 are safe (RFC 8446, 5.5)
constexpr size_t kReadBufferBytes = 16 * kRecordBytes;  // received at a time

template <typename Function>
void find(void* library, const char* name, Function* function, std::string* missing) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  if (*function == nullptr && missing->empty()) *missing = name;
}

// Loaded once, and never unloaded.
Status load(const char* path, const OpenSsl** loaded) {
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return {Code::kInvalid, dlerror()};
  auto ssl = std::make_unique<OpenSsl>();
  std::string missing;
#define TFRING_FIND(name) find(library, #name, &ssl->name, &missing)
  TFRING_FIND(TLS_method);
  TFRING_FIND(SSL_CTX_new);
  TFRING_FIND(SSL_CTX_free);
  TFRING_FIND(SSL_CTX_ctrl);
  TFRING_FIND(SSL_CTX_set_ciphersuites);
  TFRING_FIND(SSL_CTX_set_num_tickets);
  TFRING_FIND(SSL_CTX_set_verify);
  TFRING_FIND(SSL_CTX_set_default_read_buffer_len);
  TFRING_FIND(SSL_CTX_set_psk_client_callback);
  TFRING_FIND(SSL_CTX_set_psk_server_callback);
  TFRING_FIND(SSL_new);
  TFRING_FIND(SSL_free);
  TFRING_FIND(SSL_set_ex_data);
  TFRING_FIND(SSL_get_ex_data);
  TFRING_FIND(SSL_set_read_ahead);
  TFRING_FIND(SSL_set_bio);
  TFRING_FIND(SSL_set_accept_state);
  TFRING_FIND(SSL_set_connect_state);
  TFRING_FIND(SSL_do_handshake);
  TFRING_FIND(SSL_session_reused);
  TFRING_FIND(SSL_get_error);
  TFRING_FIND(SSL_read);
  TFRING_FIND(SSL_write);
  TFRING_FIND(SSL_key_update);
  TFRING_FIND(BIO_meth_new);
  TFRING_FIND(BIO_meth_set_write);
  TFRING_FIND(BIO_meth_set_read);
  TFRING_FIND(BIO_meth_set_ctrl);
  TFRING_FIND(BIO_new);
  TFRING_FIND(BIO_set_data);
  TFRING_FIND(BIO_get_data);
  TFRING_FIND(BIO_set_init);
  TFRING_FIND(BIO_set_flags);
  TFRING_FIND(BIO_clear_flags);
  TFRING_FIND(ERR_get_error);
  TFRING_FIND(ERR_error_string_n);
  TFRING_FIND(ERR_clear_error);
#undef TFRING_FIND
  if (!missing.empty()) {
    dlclose(library);
    return {Code::kInvalid, std::string(path) + " has no function " + missing};
  }
  *loaded = ssl.release();
  return {};
}

class OpenSslTls final : public Tls {
 public:
  OpenSslTls(const OpenSsl& ssl, int fd, const unsigned char* key) : ssl_(ssl), fd_(fd) {
    std::memcpy(key_, key, sizeof(key_));
    unsent_.reserve(kUnsentBytes);
  }

  ~OpenSslTls() override {
    if (connection_ != nullptr) ssl_.SSL_free(connection_);
    if (context_ != nullptr) ssl_.SSL_CTX_free(context_);
    explicit_bzero(key_, sizeof(key_));
  }

  Status handshake(bool accepts, double seconds) {
    if (!make(accepts)) return failed("cannot be set up");
    const int64_t start = now_nanoseconds();
    while (true) {
      ssl_.ERR_clear_error();
      const int result = ssl_.SSL_do_handshake(connection_);
      const int error = result == 1 ? 0 : ssl_.SSL_get_error(connection_, result);
      if (error != 0 && error != kWantRead && error != kWantWrite) {
        const Status why = failed("was refused");
        (void)flush();  // the alert that tells the peer
        return why;
      }
      while (!flush() && !is_gone_) {
        if (!wait(POLLOUT, start, seconds)) return late();
      }
      if (is_gone_) return {Code::kPeerLost, "the other side closed the connection"};
      if (error == 0) break;
      if (!wait(POLLIN, start, seconds)) return late();
    }
    // A certificate, which any process can make, is not a proof.
    if (ssl_.SSL_session_reused(connection_) != 1) return {Code::kInvalid, "the other side has no key"};
    explicit_bzero(key_, sizeof(key_));
    return {};
  }

  int64_t send(const iovec* parts, int num_parts) override {
    int64_t taken = 0;
    while (true) {
      if (!flush()) return is_gone_ ? kGone : taken;
      taken += num_encrypted_;
      num_encrypted_ = 0;
      if (!encrypt(parts, num_parts, taken)) return kGarbled;
      if (num_encrypted_ == 0) return taken;
    }
  }

  int64_t receive(const iovec* parts, int num_parts) override {
    const Reading reading(&is_reading_);
    int64_t moved = 0;
    for (int i = 0; i < num_parts; ++i) {
      auto* to = static_cast<char*>(parts[i].iov_base);
      int64_t left = static_cast<int64_t>(parts[i].iov_len);
      while (left > 0) {
        ssl_.ERR_clear_error();
        const int got = ssl_.SSL_read(connection_, to, static_cast<int>(std::min<int64_t>(left, 1 << 30)));
        if (got <= 0) {
          if (moved > 0) return moved;  // the next call fails again
          if (is_gone_) return kGone;
          return ssl_.SSL_get_error(connection_, got) == kWantRead ? 0 : kGarbled;
        }
        to += got;
        left -= got;
        moved += got;
      }
    }
    return moved;
  }

  unsigned int give_key(unsigned char* to, unsigned int room) const {
    if (room < sizeof(key_)) return 0;
    std::memcpy(to, key_, sizeof(key_));
    return sizeof(key_);
  }

  // For OpenSSL: writes encrypted data, and reads received data.
  int take_encrypted(const char* bytes, int size) {
    if (is_reading_) return size;  // an alert: errors use the control connection
    if (unsent_.size() + static_cast<size_t>(size) > unsent_.capacity()) return -1;  // never; see encrypt()
    unsent_.insert(unsent_.end(), bytes, bytes + size);
    return size;
  }

  int read_now(BIO* bio, char* to, int room) {
    ssl_.BIO_clear_flags(bio, kRetry);
    const ssize_t got = recv(fd_, to, static_cast<size_t>(room), MSG_DONTWAIT);
    if (got > 0) return static_cast<int>(got);
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) {
      ssl_.BIO_set_flags(bio, kRetryRead);
    } else {
      is_gone_ = true;
    }
    return -1;
  }

  const OpenSsl& library() const { return ssl_; }

 private:
  struct Reading {
    explicit Reading(bool* on) : is_on(on) { *is_on = true; }
    ~Reading() { *is_on = false; }
    bool* const is_on;
  };

  bool make(bool accepts);

  // Returns whether the kernel has all that is encrypted.
  bool flush() {
    while (sent_ < unsent_.size()) {
      const ssize_t got =
          ::send(fd_, unsent_.data() + sent_, unsent_.size() - sent_, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (got < 0) {
        is_gone_ = errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR;
        return false;
      }
      sent_ += static_cast<size_t>(got);
    }
    unsent_.clear();
    sent_ = 0;
    return true;
  }

  // Encrypts bytes from `begin`, as many as there is room for.
  bool encrypt(const iovec* parts, int num_parts, int64_t begin) {
    for (int i = 0; i < num_parts; ++i) {
      const auto* from = static_cast<const char*>(parts[i].iov_base);
      int64_t left = static_cast<int64_t>(parts[i].iov_len);
      const int64_t skipped = std::min(begin, left);
      begin -= skipped;
      from += skipped;
      left -= skipped;
      while (left > 0) {
        const int64_t room = kUnsentBytes - static_cast<int64_t>(unsent_.size());
        if (room < kRecordBytes + kRecordOverhead) return true;
        const int size = static_cast<int>(std::min(left, kRecordBytes));
        ssl_.ERR_clear_error();
        if (++num_records_ % kRecordsOfAKey == 0 && ssl_.SSL_key_update(connection_, kNotRequested) != 1)
          return false;
        if (ssl_.SSL_write(connection_, from, size) != size) return false;
        num_encrypted_ += size;
        from += size;
        left -= size;
      }
    }
    return true;
  }

  bool wait(short events, int64_t start, double seconds) const {
    const double left = seconds - seconds_between(start, now_nanoseconds());
    if (left <= 0) return false;
    pollfd one{fd_, events, 0};
    poll(&one, 1, static_cast<int>(std::min(left, 1e6) * 1e3) + 1);
    return true;
  }

  Status failed(const char* what) const {
    if (is_gone_) return {Code::kPeerLost, "the other side closed the connection"};
    char reason[256] = "no reason is known";
    const unsigned long code = ssl_.ERR_get_error();
    if (code != 0) ssl_.ERR_error_string_n(code, reason, sizeof(reason));
    return {Code::kInvalid, std::string("TLS ") + what + " (" + reason + ")"};
  }

  static Status late() { return {Code::kTimeout, "the other side did not finish the TLS handshake"}; }

  const OpenSsl& ssl_;
  const int fd_;
  unsigned char key_[kTlsKeyBytes];
  SSL_CTX* context_ = nullptr;
  SSL* connection_ = nullptr;
  std::vector<char> unsent_;   // encrypted
  size_t sent_ = 0;            // bytes of `unsent_` that the kernel has
  int64_t num_encrypted_ = 0;  // bytes of the caller in `unsent_`
  int64_t num_records_ = 0;    // sent
  bool is_reading_ = false;
  bool is_gone_ = false;
};

const OpenSsl* the_library = nullptr;  // for the callbacks; set before the first connection is made

unsigned int key_of_client(SSL* connection, const char*, char* identity, unsigned int room,
                           unsigned char* key, unsigned int key_room) {
  if (room < sizeof(kIdentity)) return 0;
  std::memcpy(identity, kIdentity, sizeof(kIdentity));
  return static_cast<OpenSslTls*>(the_library->SSL_get_ex_data(connection, 0))->give_key(key, key_room);
}

unsigned int key_of_server(SSL* connection, const char* identity, unsigned char* key, unsigned int key_room) {
  if (std::strcmp(identity, kIdentity) != 0) return 0;
  return static_cast<OpenSslTls*>(the_library->SSL_get_ex_data(connection, 0))->give_key(key, key_room);
}

OpenSslTls* of(BIO* bio) { return static_cast<OpenSslTls*>(the_library->BIO_get_data(bio)); }

int write_bio(BIO* bio, const char* bytes, int size) { return of(bio)->take_encrypted(bytes, size); }
int read_bio(BIO* bio, char* to, int room) { return of(bio)->read_now(bio, to, room); }
long control_bio(BIO*, int command, long, void*) { return command == kFlush ? 1 : 0; }

BIO_METHOD* make_method(const OpenSsl& ssl) {
  BIO_METHOD* method = ssl.BIO_meth_new(kSourceSink, "tfring");
  if (method == nullptr) return nullptr;
  ssl.BIO_meth_set_write(method, write_bio);
  ssl.BIO_meth_set_read(method, read_bio);
  ssl.BIO_meth_set_ctrl(method, control_bio);
  return method;
}

bool OpenSslTls::make(bool accepts) {
  static BIO_METHOD* const method = make_method(ssl_);
  context_ = ssl_.SSL_CTX_new(ssl_.TLS_method());
  if (method == nullptr || context_ == nullptr) return false;
  if (ssl_.SSL_CTX_ctrl(context_, kSetMinVersion, kTls13, nullptr) != 1) return false;
  // The cipher for which processors have instructions, with the hash of keys from callbacks.
  if (ssl_.SSL_CTX_set_ciphersuites(context_, "TLS_AES_128_GCM_SHA256") != 1) return false;
  if (ssl_.SSL_CTX_set_num_tickets(context_, 0) != 1) return false;
  if (!accepts) ssl_.SSL_CTX_set_verify(context_, kVerifyPeer, nullptr);  // no certificate is accepted
  ssl_.SSL_CTX_set_default_read_buffer_len(context_, kReadBufferBytes);
  ssl_.SSL_CTX_set_psk_client_callback(context_, key_of_client);
  ssl_.SSL_CTX_set_psk_server_callback(context_, key_of_server);
  connection_ = ssl_.SSL_new(context_);
  if (connection_ == nullptr || ssl_.SSL_set_ex_data(connection_, 0, this) != 1) return false;
  BIO* bio = ssl_.BIO_new(method);
  if (bio == nullptr) return false;
  ssl_.BIO_set_data(bio, this);
  ssl_.BIO_set_init(bio, 1);
  ssl_.SSL_set_bio(connection_, bio, bio);  // the connection owns it from now on
  ssl_.SSL_set_read_ahead(connection_, 1);
  accepts ? ssl_.SSL_set_accept_state(connection_) : ssl_.SSL_set_connect_state(connection_);
  return true;
}

}  // namespace

Status Tls::open(const char* library, int fd, bool accepts, const unsigned char* key, double seconds,
                 std::unique_ptr<Tls>* tls) {
  static const Status loaded = load(library, &the_library);
  TFRING_TRY(loaded);
  fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
  auto opened = std::make_unique<OpenSslTls>(*the_library, fd, key);
  TFRING_TRY(opened->handshake(accepts, seconds));
  *tls = std::move(opened);
  return {};
}

}  // namespace tfring
