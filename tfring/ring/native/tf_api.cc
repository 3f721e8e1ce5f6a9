// Looks TensorFlow's C API up in the libraries already loaded.
#include "tf_api.h"

#include <dlfcn.h>

namespace tfring {

TfApi tf{};

void* find_tf_symbol(const char* name) {
  // Wheels have the C API in these two libraries; the location of a symbol changes between releases.
  for (const char* library : {"libtensorflow_framework.so.2", "libtensorflow_cc.so.2"}) {
    void* loaded = dlopen(library, RTLD_LAZY | RTLD_NOLOAD);
    void* symbol = loaded == nullptr ? nullptr : dlsym(loaded, name);
    if (symbol != nullptr) return symbol;
  }
  return nullptr;
}

std::string load_tf_api() {
  if (find_tf_symbol("TF_NewStatus") == nullptr) return "TensorFlow is not loaded in this process";
#define TFRING_LOOK_UP(result, name, arguments)                           \
  tf.name = reinterpret_cast<result(*) arguments>(find_tf_symbol(#name)); \
  if (tf.name == nullptr) {                                               \
    return "this TensorFlow does not have the C API function " #name;     \
  }
  TFRING_TF_SYMBOLS(TFRING_LOOK_UP)
#undef TFRING_LOOK_UP
  return {};
}

}  // namespace tfring
