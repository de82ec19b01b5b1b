/* See wire_module.h: arguments and results. They keep the interpreter lock, because messages are small. */

#include "wire_module.h"

#include "wire.h"

static int are_given(Py_ssize_t count, Py_ssize_t wanted)
{
    if (count == wanted)
        return 1;
    PyErr_Format(PyExc_TypeError, "takes %zd arguments, not %zd", wanted, count);
    return 0;
}

/* Whether two arguments are the key and the instance of a session; they live as long as the arguments. */
static int session_of(PyObject *key, PyObject *instance, wire_session *of)
{
    char *key_bytes, *instance_bytes;
    Py_ssize_t key_count, instance_count;
    if (PyBytes_AsStringAndSize(key, &key_bytes, &key_count) < 0 ||
        PyBytes_AsStringAndSize(instance, &instance_bytes, &instance_count) < 0)
        return 0;
    if ((key_count && key_count != WIRE_KEY_BYTES) || instance_count != WIRE_INSTANCE_BYTES) {
        PyErr_Format(PyExc_ValueError, "a key of %zd bytes and an instance of %zd; they take 0 or %d, and %d", key_count,
                     instance_count, WIRE_KEY_BYTES, WIRE_INSTANCE_BYTES);
        return 0;
    }
    *of = (wire_session){(const uint8_t *)key_bytes, (const uint8_t *)instance_bytes, (size_t)key_count};
    return 1;
}

/* Whether some arguments are numbers of 64 bits, without a sign or with one, and which. */
static int unsigned_of(PyObject *const *given, size_t count, uint64_t *into)
{
    for (size_t i = 0; i < count; i++) {
        into[i] = PyLong_AsUnsignedLongLong(given[i]);
        if (into[i] == (uint64_t)-1 && PyErr_Occurred())
            return 0;
    }
    return 1;
}

static int signed_of(PyObject *const *given, size_t count, int64_t *into)
{
    for (size_t i = 0; i < count; i++) {
        into[i] = PyLong_AsLongLong(given[i]);
        if (into[i] == -1 && PyErr_Occurred())
            return 0;
    }
    return 1;
}

static int version_of(PyObject *given, uint8_t *version)
{
    const long number = PyLong_AsLong(given);
    if (number == -1 && PyErr_Occurred())
        return 0;
    *version = (uint8_t)number;
    if (*version == number)
        return 1;
    PyErr_Format(PyExc_ValueError, "version %ld does not fit a byte", number);
    return 0;
}

/* ---- reads --------------------------------------------------------------------------------------------------------- */

const char make_read_doc[] =
    "make_read(key, instance, version, request_id, counter, taken_bytes, ledger_id, entry_id, stride)\n--\n\n"
    "Return the message of a read of one entry.\n\n"
    "Args:\n"
    "    key: The key of the session, 32 bytes; empty for checksums instead of MACs.\n"
    "    instance: The bookie's instance, 16 bytes.\n"
    "    version: The version of the protocol.\n"
    "    request_id: The id of the request.\n"
    "    counter: Its counter.\n"
    "    taken_bytes: Bytes of replies that the client has received.\n"
    "    ledger_id: The ledger.\n"
    "    entry_id: The entry.\n"
    "    stride: The distance of entry ids.\n";

PyObject *make_read(PyObject *module, PyObject *const *given, Py_ssize_t count)
{
    (void)module;
    wire_session of;
    uint8_t version;
    uint64_t ids[3];
    int64_t numbers[3];
    if (!are_given(count, 9) || !session_of(given[0], given[1], &of) || !version_of(given[2], &version) ||
        !unsigned_of(given + 3, 3, ids) || !signed_of(given + 6, 3, numbers))
        return NULL;
    const wire_read read = {ids[0], ids[1], ids[2], numbers[0], numbers[1], numbers[1], numbers[2], 1, 0};
    PyObject *made = PyBytes_FromStringAndSize(NULL, WIRE_REQUEST_BYTES);
    if (made != NULL)
        wire_write_read(&of, version, &read, (uint8_t *)PyBytes_AsString(made));
    return made;
}

const char take_read_doc[] =
    "take_read(message, key, instance, read_type)\n--\n\n"
    "Decode a message if it is an authentic read with valid numbers.\n\n"
    "Args:\n"
    "    message: The one frame of a message.\n"
    "    key: As of make_read.\n"
    "    instance: As of make_read.\n"
    "    read_type: The named tuple of the ledger, the first entry, the last one, the stride, the bytes wanted, and\n"
    "        whether to fence, and to check.\n\n"
    "Returns:\n"
    "    Request id, counter, bytes taken, and the read; None for any other message.\n";

/* Return an instance of a type of named tuples. */
static PyObject *read_as(PyTypeObject *type, const wire_read *read)
{
    const int64_t numbers[] = {read->ledger_id, read->first, read->last, read->stride, read->bytes_max};
    enum { NUMBERS = sizeof numbers / sizeof *numbers, ITEMS = NUMBERS + 2 };
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    PyObject *made = allocate(type, ITEMS);
    for (Py_ssize_t i = 0; made != NULL && i < ITEMS; i++) {
        PyObject *item = i < NUMBERS ? PyLong_FromLongLong(numbers[i]) : PyBool_FromLong(read->flags >> (i - NUMBERS) & 1);
        if (item == NULL)
            Py_CLEAR(made);
        else
            PyTuple_SetItem(made, i, item);
    }
    return made;
}

PyObject *take_read(PyObject *module, PyObject *const *given, Py_ssize_t count)
{
    (void)module;
    wire_session of;
    Py_buffer message;
    if (!are_given(count, 4) || !session_of(given[1], given[2], &of))
        return NULL;
    if (!PyType_Check(given[3]) || !PyType_IsSubtype((PyTypeObject *)given[3], &PyTuple_Type)) {
        PyErr_Format(PyExc_TypeError, "%R is not a type of named tuples", given[3]);
        return NULL;
    }
    if (PyObject_GetBuffer(given[0], &message, PyBUF_SIMPLE) < 0)
        return NULL;
    wire_read read;
    const int taken = wire_take_read(&of, message.buf, (size_t)message.len, &read);
    PyBuffer_Release(&message);
    if (!taken)
        Py_RETURN_NONE;
    PyObject *request = read_as((PyTypeObject *)given[3], &read);
    if (request == NULL)
        return NULL;
    return Py_BuildValue("(KKKN)", (unsigned long long)read.request_id, (unsigned long long)read.counter,
                         (unsigned long long)read.taken_bytes, request);
}

/* ---- answers ------------------------------------------------------------------------------------------------------- */

const char make_answer_doc[] =
    "make_answer(key, instance, version, request_id, entry_id, stride, entry)\n--\n\n"
    "Return the message of an answer with one entry.\n\n"
    "Args:\n"
    "    key: As of make_read.\n"
    "    instance: As of make_read.\n"
    "    version: The version of the protocol.\n"
    "    request_id: The id of the request.\n"
    "    entry_id: The entry.\n"
    "    stride: The distance of entry ids.\n"
    "    entry: The entry, encoded, up to 8 KiB.\n";

PyObject *make_answer(PyObject *module, PyObject *const *given, Py_ssize_t count)
{
    (void)module;
    wire_session of;
    uint8_t version;
    wire_entry about = {0};
    Py_buffer entry;
    if (!are_given(count, 7) || !session_of(given[0], given[1], &of) || !version_of(given[2], &version) ||
        !unsigned_of(given + 3, 1, &about.request_id) || !signed_of(given + 4, 1, &about.first) ||
        !unsigned_of(given + 5, 1, &about.stride) || PyObject_GetBuffer(given[6], &entry, PyBUF_SIMPLE) < 0)
        return NULL;
    PyObject *made = NULL;
    if (entry.len > WIRE_BODY_BYTES_MAX)
        PyErr_Format(PyExc_ValueError, "an entry of %zd bytes; it takes up to %d", entry.len, WIRE_BODY_BYTES_MAX);
    else
        made = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)wire_answer_bytes((size_t)entry.len));
    if (made != NULL)
        wire_write_answer(&of, version, &about, entry.buf, (size_t)entry.len, (uint8_t *)PyBytes_AsString(made));
    PyBuffer_Release(&entry);
    return made;
}

const char take_reply_doc[] =
    "take_reply(message, key, instance)\n--\n\n"
    "Decode a message if it is an authentic, whole answer with one entry and nothing else, or a reply without content.\n\n"
    "Args:\n"
    "    message: The one frame of a message.\n"
    "    key: As of make_read.\n"
    "    instance: As of make_read.\n\n"
    "Returns:\n"
    "    Request id, flags, entry id, stride, and where the entry starts and ends in the message, which is not verified;\n"
    "    both are the end of the message if it has none. None for any other message.\n";

PyObject *take_reply(PyObject *module, PyObject *const *given, Py_ssize_t count)
{
    (void)module;
    wire_session of;
    Py_buffer message;
    if (!are_given(count, 3) || !session_of(given[1], given[2], &of) ||
        PyObject_GetBuffer(given[0], &message, PyBUF_SIMPLE) < 0)
        return NULL;
    wire_entry found;
    const int taken = wire_take_reply(&of, message.buf, (size_t)message.len, &found);
    PyBuffer_Release(&message);
    if (!taken)
        Py_RETURN_NONE;
    return Py_BuildValue("(KiLKnn)", (unsigned long long)found.request_id, (int)found.flags, (long long)found.first,
                         (unsigned long long)found.stride, (Py_ssize_t)found.start, (Py_ssize_t)found.end);
}

/* ---- adds ---------------------------------------------------------------------------------------------------------- */

const char take_add_doc[] =
    "take_add(message, key, instance)\n--\n\n"
    "Decode a message if it is an authentic, whole add of one entry with valid numbers.\n\n"
    "Args:\n"
    "    message: The one frame of a message.\n"
    "    key: As of make_read.\n"
    "    instance: As of make_read.\n\n"
    "Returns:\n"
    "    Request id, counter, bytes taken, flags, ledger, last add confirmed, entry id, stride, and where the entry starts\n"
    "    and ends in the message; None for any other message.\n";

PyObject *take_add(PyObject *module, PyObject *const *given, Py_ssize_t count)
{
    (void)module;
    wire_session of;
    Py_buffer message;
    if (!are_given(count, 3) || !session_of(given[1], given[2], &of) ||
        PyObject_GetBuffer(given[0], &message, PyBUF_SIMPLE) < 0)
        return NULL;
    wire_add add;
    const int taken = wire_take_add(&of, message.buf, (size_t)message.len, &add);
    PyBuffer_Release(&message);
    if (!taken)
        Py_RETURN_NONE;
    const wire_entry *one = &add.entry;
    return Py_BuildValue("(KKKiLLLKnn)", (unsigned long long)one->request_id, (unsigned long long)add.counter,
                         (unsigned long long)add.taken_bytes, (int)one->flags, (long long)add.ledger_id,
                         (long long)add.lac, (long long)one->first, (unsigned long long)one->stride,
                         (Py_ssize_t)one->start, (Py_ssize_t)one->end);
}
