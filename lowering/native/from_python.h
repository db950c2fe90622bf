// Operators of ours called from Python in a straight line. To put every argument into a box and take it
// out again takes torch two microseconds. Here they are read as what they are, where that has only one
// answer: tensors of CPUs, no gradient, no modes. Every other call goes to torch's own function for the
// operator (from_python.cpp, `_call_straight` in lowering/native/library.py).
// Tensors are held while a kernel runs: Python goes on meanwhile, and may drop or swap them.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/GradMode.h>
#include <c10/util/string_view.h>

#include <exception>
#include <optional>
#include <string_view>
#include <tuple>
#include <vector>

#include "python_objects.h"
#include "tensors.h"

namespace kd::from_python {

// What a call knows of itself, and what it has to find out about its tensors.
struct Call {
  bool graded = c10::GradMode::is_enabled();
  c10::DispatchKeySet keys;

  // Nothing where torch has to see it.
  const Tensor* tensor(PyObject* object);
  // Whether torch's dispatcher would take the kernel for CPUs, and no mode before it.
  bool is_plain() const;
};

template <class T>
struct Argument;

template <>
struct Argument<Tensor> {
  Tensor found;
  bool read(PyObject* object, Call& call) {
    const Tensor* const tensor = call.tensor(object);
    if (tensor != nullptr) found = *tensor;
    return tensor != nullptr;
  }
  const Tensor& get() const { return found; }
};
template <>
struct Argument<const Tensor&> : Argument<Tensor> {};

template <>
struct Argument<const OptionalTensor&> {
  OptionalTensor found;
  bool read(PyObject* object, Call& call) {
    if (object == Py_None) return true;
    const Tensor* const tensor = call.tensor(object);
    if (tensor != nullptr) found = *tensor;
    return tensor != nullptr;
  }
  const OptionalTensor& get() const { return found; }
};

template <>
struct Argument<int64_t> {
  int64_t found;
  bool read(PyObject* object, Call&) {
    if (!PyLong_CheckExact(object)) return false;
    int overflow;
    found = PyLong_AsLongLongAndOverflow(object, &overflow);
    return overflow == 0;
  }
  int64_t get() const { return found; }
};

template <>
struct Argument<double> {
  double found;
  bool read(PyObject* object, Call&) {
    if (!PyFloat_CheckExact(object)) return false;
    found = PyFloat_AS_DOUBLE(object);
    return true;
  }
  double get() const { return found; }
};

template <>
struct Argument<bool> {
  bool found;
  bool read(PyObject* object, Call&) {
    found = object == Py_True;
    return PyBool_Check(object);
  }
  bool get() const { return found; }
};

template <class T>
struct Argument<at::ArrayRef<T>> {
  c10::SmallVector<T, 8> found;
  bool read(PyObject* object, Call& call) {
    if (!PyList_CheckExact(object)) return false;
    const Py_ssize_t count = PyList_GET_SIZE(object);
    found.reserve(static_cast<size_t>(count));
    for (Py_ssize_t i = 0; i < count; i++) {
      Argument<T> one;
      if (!one.read(PyList_GET_ITEM(object, i), call)) return false;
      found.push_back(std::move(one.found));
    }
    return true;
  }
  at::ArrayRef<T> get() const { return found; }
};

template <>
struct Argument<c10::string_view> {
  c10::string_view found;
  bool read(PyObject* object, Call&) {
    if (!PyUnicode_CheckExact(object)) return false;
    Py_ssize_t size;
    const char* const text = PyUnicode_AsUTF8AndSize(object, &size);
    if (text == nullptr) return PyErr_Clear(), false;
    found = {text, static_cast<size_t>(size)};
    return true;
  }
  c10::string_view get() const { return found; }
};

PyObject* wrapped(const Tensor& tensor);
PyObject* wrapped(const std::vector<Tensor>& tensors);
PyObject* wrapped(const std::tuple<Tensor, Tensor>& tensors);
// Sets Python's error to what torch makes of an exception.
PyObject* raised(const std::exception_ptr& failure);

// Torch's function for an operator, and its arguments, so that they are found by name.
struct Known {
  static constexpr const char* kName = "kernel_dispatch.operator";
  Owned function, names;
  Owned defaults;         // of the last arguments, as many as have one
  Py_ssize_t positional;  // how many arguments need no name
  c10::OperatorHandle handle;
};

constexpr size_t kMost = 32;  // arguments
// Puts a call's arguments where they belong; false where torch has to say what is wrong with them.
bool in_order(const Known& known, PyObject* const* given, Py_ssize_t count, PyObject* keywords,
              PyObject** placed, size_t expected);

template <class Result, class... As, size_t... I>
PyObject* straight(const Known& known, PyObject* const* given, Py_ssize_t count,
                   PyObject* keywords, const c10::TypedOperatorHandle<Result(As...)>& kernel,
                   std::index_sequence<I...>) {
  static_assert(sizeof...(As) <= kMost);
  Call call;
  std::tuple<Argument<As>...> read;
  PyObject* placed[sizeof...(As)];
  if (!in_order(known, given, count, keywords, placed, sizeof...(As)) ||
      !(std::get<I>(read).read(placed[I], call) && ...) || !call.is_plain())
    return PyObject_Vectorcall(known.function.object, given, static_cast<size_t>(count), keywords);
  std::optional<Result> result;
  std::exception_ptr failure;
  PyThreadState* const state = PyEval_SaveThread();
  try {
    // By way of the dispatcher: the kernel may have been replaced, and somebody may measure times.
    const c10::impl::ExcludeDispatchKeyGuard no_gradients(c10::autograd_dispatch_keyset);
    result.emplace(kernel.call(std::get<I>(read).get()...));
  } catch (const std::exception&) {
    failure = std::current_exception();
  }
  PyEval_RestoreThread(state);  // ends the thread where the interpreter shuts down: not to be caught
  return failure ? raised(failure) : wrapped(*result);
}

template <class Result, class... As>
PyObject* straight(const Known& known, PyObject* const* given, Py_ssize_t count,
                   PyObject* keywords, Result (*)(As...)) {
  return straight(known, given, count, keywords, known.handle.typed<Result(As...)>(),
                  std::index_sequence_for<As...>());
}

// `function`: the operator's kernel, for its signature.
template <auto function>
PyObject* entry(PyObject* self, PyObject* const* given, Py_ssize_t count, PyObject* keywords) {
  try {
    return straight(*inside<Known>(self), given, count, keywords, function);
  } catch (const std::exception&) {  // no memory
    return raised(std::current_exception());
  }
}

using Entry = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t, PyObject*);
void offer(const char* name, Entry entry);

// Where a file makes operators: `const Offered offered("name", entry<function>)`.
struct Offered {
  Offered(const char* name, Entry entry) { offer(name, entry); }
};

}  // namespace kd::from_python
