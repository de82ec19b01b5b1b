/* Calls of the main thread that signals do not interrupt; pybk/threads/interrupts.py has the theory of operation.

   CPython's handler in C sets a flag, and the main thread calls the handler in Python at its next look at the flag,
   between any two instructions. Here `deferring` stands before CPython's handler: while the main thread is in a guard, it
   notes the signal, which is passed on when the guard ends, or at a checkpoint.

   `depth` is changed by the main thread alone. A handler may run in any thread, so it notes the signal before it looks at
   `depth`, and the end of a guard clears `depth` before it looks at what is noted: one of the two passes the signal on,
   and the exchange in `pass_on` lets only one do so. When a guard begins, a handler in another thread may have seen a
   `depth` of 0 and not have passed its signal on yet; `settle` waits for it. */

#include "guard.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>

typedef void (*handler)(int);

/* Those for which programs have handlers; one in Python for another signal may interrupt a guarded call. */
static const int SIGNALS[] = {SIGHUP,  SIGINT,  SIGQUIT,   SIGUSR1, SIGUSR2,  SIGALRM,
                              SIGTERM, SIGCHLD, SIGVTALRM, SIGPROF, SIGWINCH, SIGIO};
#define COUNT GUARD_SIGNALS
_Static_assert(sizeof SIGNALS / sizeof *SIGNALS == COUNT, "the state of the module has a place for each signal");

static atomic_int depth;             /* the guards that the main thread is in */
static atomic_int handling;          /* the calls of `deferring` that run now */
static atomic_int noted[COUNT];      /* whether a signal came in a guard and was not passed on yet */
static _Atomic(handler) pythons;     /* CPython's handler, one for all signals; NULL before it is known */
static atomic_int knows_main;
static pthread_t main_thread;

static int is_main(void) { return pthread_equal(pthread_self(), main_thread); }

/* ---- passing signals on -------------------------------------------------------------------------------------------- */

static void pass_on(size_t at)
{
    if (atomic_exchange(&noted[at], 0))
        atomic_load(&pythons)(SIGNALS[at]);
}

static void pass_all_on(void)
{
    for (size_t at = 0; at < COUNT; at++)
        if (atomic_load(&noted[at]))
            pass_on(at);
}

/* The handler in C of the signals that Python handles. One of a library that was set later may call it as the one that
   was there before. */
static void deferring(int number)
{
    const int error = errno;
    atomic_fetch_add(&handling, 1);
    size_t at = 0;
    while (SIGNALS[at] != number)
        at++;
    atomic_store(&noted[at], 1);
    if (atomic_load(&depth) == 0)
        pass_on(at);
    atomic_fetch_sub(&handling, 1);
    errno = error;
}

/* Return when no handler in another thread is between its look at `depth` and what it does then. */
static void settle(void)
{
    while (atomic_load(&handling))
        sched_yield();
}

/* ---- standing before CPython's handler ------------------------------------------------------------------------------ */

/* Learn CPython's handler from a signal that has none, which Python handles for a moment; -1 with an exception if a handler
   of Python's raises. */
static int learn_handler(const guard_state *state)
{
    struct sigaction action;
    int number = NSIG;
    do
        number--;
    while (number > 0 && (sigaction(number, NULL, &action) != 0 || (action.sa_flags & SA_SIGINFO) ||
                          action.sa_handler != SIG_DFL));
    PyObject *before = PyObject_CallFunction(state->signal, "iO", number, state->getsignal);
    if (before == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_ValueError))
            return -1;
        PyErr_Clear(); /* no signal is free, or this is another interpreter than the first, which sets no handlers */
        return 0;
    }
    if (sigaction(number, NULL, &action) == 0)
        atomic_store(&pythons, action.sa_handler);
    PyObject *during = PyObject_CallFunction(state->signal, "iO", number, before);
    Py_DECREF(before);
    if (during == NULL) {
        signal(number, SIG_DFL);
        return -1;
    }
    Py_DECREF(during);
    return 0;
}

/* Return whether Python has a handler for a signal; it knows none of those that libraries in C install. */
static int python_handles(const guard_state *state, size_t at)
{
    PyObject *found = PyObject_CallFunctionObjArgs(state->getsignal, state->numbers[at], NULL);
    const int handles = found != NULL && PyCallable_Check(found);
    Py_XDECREF(found);
    if (found == NULL)
        PyErr_Clear();
    return handles;
}

/* Asking the system about a signal takes several times as long as asking Python, which handles few.

   A handler of a library in C stays where it is, although Python may have one for the signal, too: it may jump out of
   itself, or call the handler that was there before. */
static void stand_before(const guard_state *state, size_t at)
{
    struct sigaction action;
    if (!python_handles(state, at) || sigaction(SIGNALS[at], NULL, &action) != 0 || (action.sa_flags & SA_SIGINFO) ||
        action.sa_handler != atomic_load(&pythons))
        return;
    action.sa_handler = deferring;
    sigaction(SIGNALS[at], &action, NULL);
}

/* ---- guards -------------------------------------------------------------------------------------------------------- */

/* Begin the outermost guard; -1 with an exception, and no guard, if the handler of an earlier signal raises. */
static int begin(const guard_state *state)
{
    if (PyErr_CheckSignals() < 0 || (atomic_load(&pythons) == NULL && learn_handler(state) < 0))
        return -1;
    atomic_store(&depth, 1);
    for (size_t at = 0; at < COUNT; at++)
        stand_before(state, at);
    settle();
    if (PyErr_CheckSignals() == 0) /* none came in the meantime */
        return 0;
    atomic_store(&depth, 0);
    pass_all_on();
    return -1;
}

static void end(void)
{
    if (atomic_fetch_sub(&depth, 1) == 1)
        pass_all_on();
}

static PyObject *called(PyObject *const *given, Py_ssize_t count)
{
    if (count == 1)
        return PyObject_CallNoArgs(given[0]);
    if (count == 2)
        return PyObject_CallFunctionObjArgs(given[0], given[1], NULL);
    if (count == 3)
        return PyObject_CallFunctionObjArgs(given[0], given[1], given[2], NULL);
    PyObject *arguments = PyTuple_New(count - 1);
    if (arguments == NULL)
        return NULL;
    for (Py_ssize_t i = 1; i < count; i++)
        PyTuple_SetItem(arguments, i - 1, Py_NewRef(given[i]));
    PyObject *result = PyObject_Call(given[0], arguments, NULL);
    Py_DECREF(arguments);
    return result;
}

/* Prepare a forked child: the thread that forked is its main thread, and it has none of its parent's signals. */
static void in_child(void)
{
    if (!is_main()) {
        main_thread = pthread_self();
        atomic_store(&depth, 0);
    }
    atomic_store(&handling, 0);
    for (size_t at = 0; at < COUNT; at++)
        atomic_store(&noted[at], 0);
}

/* Learn which thread is the main thread; -1 with an exception if that is not known. */
static int learn_main(void)
{
    PyObject *threading = PyImport_ImportModule("threading");
    PyObject *thread = threading == NULL ? NULL : PyObject_CallMethod(threading, "main_thread", NULL);
    PyObject *ident = thread == NULL ? NULL : PyObject_GetAttrString(thread, "ident");
    const unsigned long found = ident == NULL ? 0 : PyLong_AsUnsignedLong(ident);
    Py_XDECREF(ident);
    Py_XDECREF(thread);
    Py_XDECREF(threading);
    if (PyErr_Occurred())
        return -1;
    main_thread = (pthread_t)found;
    if (atomic_exchange(&knows_main, 1) == 0)
        pthread_atfork(NULL, NULL, in_child);
    return 0;
}

const char guarded_doc[] = "guarded(call, /, *arguments)\n--\n\n"
                           "Return ``call(*arguments)``; see ``pybk.threads.interrupts``.\n";

PyObject *guarded(PyObject *module, PyObject *const *given, Py_ssize_t count)
{
    if (count < 1) {
        PyErr_SetString(PyExc_TypeError, "guarded() takes a function and its arguments");
        return NULL;
    }
    if (!atomic_load(&knows_main) && learn_main() < 0)
        return NULL;
    if (!is_main())
        return called(given, count);
    if (atomic_load(&depth) > 0)
        atomic_fetch_add(&depth, 1);
    else if (begin(PyModule_GetState(module)) < 0)
        return NULL;
    PyObject *result = called(given, count);
    end();
    return result;
}

/* ---- checkpoints --------------------------------------------------------------------------------------------------- */

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations" /* the stable interface of 3.11 has no others */

/* Call the handlers in Python of the signals that CPython has noted; -1 with the exception of the last that raises.

   An exception that is set before the call is kept if none raises. */
static int handle(void)
{
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    while (PyErr_CheckSignals() < 0) {
        Py_XDECREF(type);
        Py_XDECREF(value);
        Py_XDECREF(trace);
        PyErr_Fetch(&type, &value, &trace);
    }
    const int raised = type != NULL;
    PyErr_Restore(type, value, trace);
    return raised ? -1 : 0;
}

#pragma GCC diagnostic pop

static int is_inside(void) { return atomic_load(&knows_main) && is_main() && atomic_load(&depth) > 0; }

const char checkpoint_doc[] = "checkpoint()\n--\n\n"
                              "Handle the signals that came in the guard; see ``pybk.threads.interrupts``.\n";

PyObject *checkpoint(PyObject *module, PyObject *nothing)
{
    (void)module;
    (void)nothing;
    if (!is_inside())
        Py_RETURN_NONE;
    const int inside = atomic_exchange(&depth, 0); /* a handler in Python runs as outside of a guard */
    pass_all_on();
    handle();
    atomic_store(&depth, inside);
    settle();
    if (handle() < 0) /* of signals that came in the meantime */
        return NULL;
    Py_RETURN_NONE;
}

const char is_guarded_doc[] = "is_guarded()\n--\n\n"
                              "Return whether this is the main thread, in a guard; see ``pybk.threads.interrupts``.\n";

PyObject *is_guarded(PyObject *module, PyObject *nothing)
{
    (void)module;
    (void)nothing;
    return PyBool_FromLong(is_inside());
}

/* ---- the state of the module ---------------------------------------------------------------------------------------- */

int set_up_guard(PyObject *module)
{
    guard_state *state = PyModule_GetState(module);
    PyObject *signals = PyImport_ImportModule("_signal");
    if (signals == NULL)
        return -1;
    state->getsignal = PyObject_GetAttrString(signals, "getsignal");
    state->signal = state->getsignal == NULL ? NULL : PyObject_GetAttrString(signals, "signal");
    Py_DECREF(signals);
    int failed = state->signal == NULL;
    for (size_t at = 0; at < COUNT && !failed; at++) {
        state->numbers[at] = PyLong_FromLong(SIGNALS[at]);
        failed = state->numbers[at] == NULL;
    }
    return failed ? -1 : 0;
}

int traverse_guard(PyObject *module, visitproc visit, void *arg)
{
    guard_state *state = PyModule_GetState(module);
    if (state == NULL) /* before it is set up */
        return 0;
    Py_VISIT(state->getsignal);
    Py_VISIT(state->signal);
    for (size_t at = 0; at < COUNT; at++)
        Py_VISIT(state->numbers[at]);
    return 0;
}

int clear_guard(PyObject *module)
{
    guard_state *state = PyModule_GetState(module);
    if (state == NULL)
        return 0;
    Py_CLEAR(state->getsignal);
    Py_CLEAR(state->signal);
    for (size_t at = 0; at < COUNT; at++)
        Py_CLEAR(state->numbers[at]);
    return 0;
}
