// What files that handle Python's objects share.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <memory>
#include <utility>

namespace kd {

struct Owned {
  PyObject* object;
  explicit Owned(PyObject* given) : object(given) { Py_XINCREF(object); }
  static Owned of(PyObject* made) {  // which is ours already
    Owned owned(nullptr);
    owned.object = made;
    return owned;
  }
  Owned(Owned&& other) noexcept : object(other.object) { other.object = nullptr; }
  Owned(const Owned& other) : Owned(other.object) {}
  Owned& operator=(const Owned&) = delete;
  ~Owned() { Py_XDECREF(object); }
};

// A Python function that has a `T` for its own; `method` finds it in `self`.
template <class T>
PyObject* function_with(T state, PyMethodDef* method) {
  auto owned = std::make_unique<T>(std::move(state));
  PyObject* const capsule = PyCapsule_New(owned.get(), T::kName, [](PyObject* self) {
    delete static_cast<T*>(PyCapsule_GetPointer(self, T::kName));
  });
  if (capsule == nullptr) return nullptr;
  owned.release();
  PyObject* const function = PyCFunction_New(method, capsule);
  Py_DECREF(capsule);  // the function's now
  return function;
}

template <class T>
T* inside(PyObject* self) {
  return static_cast<T*>(PyCapsule_GetPointer(self, T::kName));
}

}  // namespace kd
