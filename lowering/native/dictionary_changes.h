// Whether dictionaries are as they were when they were pinned.
//
// CPython 3.10 to 3.12 gives a dictionary a new number with each change of it. 3.13 and 3.14 do not,
// but tell who watches it of a change before it is made, and of its end.
#pragma once

#include "python_objects.h"

#if PY_VERSION_HEX >= 0x030A0000 && PY_VERSION_HEX < 0x030F0000 && !defined(Py_GIL_DISABLED)
#define KD_DICTIONARIES_TELL 1
#endif

#if KD_DICTIONARIES_TELL && PY_VERSION_HEX < 0x030D0000

namespace kd {

class Dictionaries {
 public:
  static bool tell() { return true; }

  // What `is_as_at` is to be given of this dictionary.
  uint64_t add(PyObject* dictionary) { return number_of(dictionary); }

  // Asked first. Without it none of them may be touched: it could be gone.
  bool one_changed() const { return false; }

  static bool is_as_at(PyObject* dictionary, uint64_t moment) {
    return number_of(dictionary) == moment;
  }

 private:
  static uint64_t number_of(PyObject* dictionary) {
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
    return reinterpret_cast<PyDictObject*>(dictionary)->ma_version_tag;
#pragma GCC diagnostic pop
  }
};

}  // namespace kd

#elif KD_DICTIONARIES_TELL

#include <algorithm>
#include <unordered_map>
#include <vector>

namespace kd {

// The first change is told; after it none of them is watched any more.
class Dictionaries {
 public:
  Dictionaries() = default;
  Dictionaries(const Dictionaries&) = delete;
  Dictionaries& operator=(const Dictionaries&) = delete;
  ~Dictionaries() { end(); }

  // False where others have taken all of the places that CPython has for those who watch, and with
  // 3.13.0, which tells nothing of attributes that are set (3.13.1 does).
  static bool tell() { return Py_Version >= 0x030D0100 && watcher() >= 0; }

  uint64_t add(PyObject* dictionary) {
    if (changed_) return 0;
    auto& those = watching()[dictionary];
    if (!those.empty() && those.back() == this) return 0;
    those.push_back(this);
    watched_.push_back(dictionary);
    if (PyDict_Watch(watcher(), dictionary) != 0) {
      PyErr_Clear();
      changed_ = true;
    }
    return 0;
  }

  bool one_changed() const { return changed_; }
  static bool is_as_at(PyObject*, uint64_t) { return true; }

 private:
  using Watching = std::unordered_map<PyObject*, std::vector<Dictionaries*>>;

  // By dictionary. Never destroyed: dictionaries change and end until Python does.
  static Watching& watching() {
    static auto* const all = new Watching;
    return *all;
  }

  static int watcher() {
    static const int number = [] {
      const int given = PyDict_AddWatcher(&changes);
      if (given < 0) PyErr_Clear();
      return given;
    }();
    return number;
  }

  static int changes(PyDict_WatchEvent event, PyObject* dictionary, PyObject*, PyObject*) {
    const auto found = watching().find(dictionary);
    if (found == watching().end()) return 0;
    const auto those = std::move(found->second);
    watching().erase(found);
    if (event != PyDict_EVENT_DEALLOCATED) unwatch(dictionary);
    for (Dictionaries* const each : those) each->end();
    return 0;
  }

  // Nothing of it holds any more, whatever changes next.
  void end() {
    changed_ = true;
    for (PyObject* const dictionary : watched_) leave(dictionary);
    watched_.clear();
  }

  void leave(PyObject* dictionary) {
    const auto found = watching().find(dictionary);
    if (found == watching().end()) return;  // the one that changed
    auto& those = found->second;
    those.erase(std::remove(those.begin(), those.end(), this), those.end());
    if (!those.empty()) return;
    watching().erase(found);
    unwatch(dictionary);
  }

  static void unwatch(PyObject* dictionary) {
    if (PyDict_Unwatch(watcher(), dictionary) != 0) PyErr_Clear();
  }

  std::vector<PyObject*> watched_;  // each of them alive: the end of one is told
  bool changed_ = false;
};

}  // namespace kd

#endif
