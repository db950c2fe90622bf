// What is the same for every operator that is called from Python in a straight line.

#include "from_python.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <deque>
#include <string>

namespace kd::from_python {
namespace {

struct Offer {
  std::string name;
  PyMethodDef method;
};

std::deque<Offer>& offers() {
  static auto* const all = new std::deque<Offer>;
  return *all;
}

// What the dispatcher passes by on its way to the kernel for CPUs: no operator of ours has a gradient,
// or a kernel for autocast.
uint64_t passed_by() {
  using c10::DispatchKey;
  static const uint64_t keys =
      c10::DispatchKeySet({DispatchKey::CPU, DispatchKey::AutogradCPU, DispatchKey::AutocastCPU,
                           DispatchKey::ADInplaceOrView, DispatchKey::BackendSelect})
          .raw_repr();
  return keys;
}

}  // namespace

const Tensor* Call::tensor(PyObject* object) {
  if (!THPVariable_CheckExact(object)) return nullptr;
  const Tensor& tensor = THPVariable_Unpack(object);
  if (!tensor.defined() || (graded && tensor.requires_grad())) return nullptr;
  keys = keys | tensor.key_set();
  return &tensor;
}

bool Call::is_plain() const {
  const auto here = c10::impl::tls_local_dispatch_key_set();
  const uint64_t asked = ((keys | here.included_) - here.excluded_).raw_repr();
  return (asked & ~passed_by()) == 0 && !at::impl::torch_function_mode_enabled();
}

PyObject* wrapped(const Tensor& tensor) { return THPVariable_Wrap(tensor); }

PyObject* wrapped(const std::vector<Tensor>& tensors) {
  PyObject* const list = PyList_New(static_cast<Py_ssize_t>(tensors.size()));
  for (size_t i = 0; list != nullptr && i < tensors.size(); i++)
    PyList_SET_ITEM(list, static_cast<Py_ssize_t>(i), THPVariable_Wrap(tensors[i]));
  return list;
}

PyObject* wrapped(const std::tuple<Tensor, Tensor>& tensors) {
  const Owned first = Owned::of(THPVariable_Wrap(std::get<0>(tensors)));
  const Owned second = Owned::of(THPVariable_Wrap(std::get<1>(tensors)));
  if (first.object == nullptr || second.object == nullptr) return nullptr;
  return PyTuple_Pack(2, first.object, second.object);
}

PyObject* raised(const std::exception_ptr& failure) {
  HANDLE_TH_ERRORS
  std::rethrow_exception(failure);
  END_HANDLE_TH_ERRORS
}

bool in_order(const Known& known, PyObject* const* given, Py_ssize_t count, PyObject* keywords,
              PyObject** placed, size_t expected) {
  const auto many = static_cast<Py_ssize_t>(expected);
  const Py_ssize_t required = many - PyTuple_GET_SIZE(known.defaults.object);
  if (PyTuple_GET_SIZE(known.names.object) != many || count > known.positional) return false;
  for (Py_ssize_t i = 0; i < many; i++)
    placed[i] = i < count       ? given[i]
                : i < required  ? nullptr
                                : PyTuple_GET_ITEM(known.defaults.object, i - required);
  for (Py_ssize_t k = 0; keywords != nullptr && k < PyTuple_GET_SIZE(keywords); k++) {
    PyObject* const name = PyTuple_GET_ITEM(keywords, k);
    Py_ssize_t at = count;
    while (at < many && PyUnicode_Compare(PyTuple_GET_ITEM(known.names.object, at), name) != 0) at++;
    if (at == many) return false;
    placed[at] = given[count + k];
  }
  return std::find(placed, placed + many, nullptr) == placed + many;
}

void offer(const char* name, Entry entry) {
  offers().push_back({name, {nullptr, reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(entry)),
                             METH_FASTCALL | METH_KEYWORDS, "Its arguments are not boxed."}});
  offers().back().method.ml_name = offers().back().name.c_str();
}

}  // namespace kd::from_python

// Names of the operators that can be called so.
extern "C" PyObject* kernel_dispatch_straight_names() {
  const auto& offers = kd::from_python::offers();
  PyObject* const names = PyTuple_New(static_cast<Py_ssize_t>(offers.size()));
  for (size_t i = 0; names != nullptr && i < offers.size(); i++)
    PyTuple_SET_ITEM(names, static_cast<Py_ssize_t>(i), PyUnicode_FromString(offers[i].name.c_str()));
  return names;
}

// What does what `function`, torch's own for the operator of that name, does. `names` and `defaults`:
// tuples, of all its arguments and of the last ones; `positional`: how many need no name.
extern "C" PyObject* kernel_dispatch_straight(PyObject* name, PyObject* function, PyObject* names,
                                              PyObject* defaults, PyObject* positional) {
  using namespace kd;
  for (auto& offer : from_python::offers()) {
    if (PyUnicode_CompareWithASCIIString(name, offer.name.c_str()) != 0) continue;
    const auto handle =
        c10::Dispatcher::singleton().findSchema({"kernel_dispatch::" + offer.name, ""});
    if (handle.has_value())
      return function_with(from_python::Known{Owned(function), Owned(names), Owned(defaults),
                                              PyLong_AsSsize_t(positional), *handle},
                           &offer.method);
  }
  Py_RETURN_NONE;
}
