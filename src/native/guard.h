/* Calls of the main thread that signals do not interrupt; pybk/threads/interrupts.py has the theory of operation. */

#ifndef PYBK_GUARD_H
#define PYBK_GUARD_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#define GUARD_SIGNALS 12

/* The state of the module. */
typedef struct {
    PyObject *getsignal, *signal, *numbers[GUARD_SIGNALS];
} guard_state;

extern const char guarded_doc[], checkpoint_doc[], is_guarded_doc[];

/* Fill in the state of a new module; -1 with an exception. */
int set_up_guard(PyObject *module);
int traverse_guard(PyObject *module, visitproc visit, void *arg);
int clear_guard(PyObject *module);

PyObject *guarded(PyObject *module, PyObject *const *given, Py_ssize_t count);
PyObject *checkpoint(PyObject *module, PyObject *nothing);
PyObject *is_guarded(PyObject *module, PyObject *nothing);

#endif
