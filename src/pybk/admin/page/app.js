// The page: polls the interface under api/v1/ next to it, and shows what it gets. Names are the input of strangers, so they
// become text and nothing else. It changes nothing: where a person has to act, it shows the command to copy.

const POLL_MS = 2000, STALE_MS = 10000, SLOW_MS = 10000, WINDOW_MS = 15 * 60 * 1000, LINES_MAX = 8, EVENTS_SHOWN = 50, LEDGERS_SHOWN = 50, RECORDS_SHOWN = 20;
const SHAPES = { ok: '●', warn: '▲', bad: '■' };

/** Commands by the code of a reason; NAME stands for a bookie. */
export const COMMANDS = {
  bookies_absent: 'bookie list', bookies_lost: 'repair list', bookies_read_only: 'bookie list',
  bookies_in_limbo: 'bookie list', bookies_flapping: 'bookie list', no_bookie: 'bookie list',
  maintenance_over: 'bookie list', too_few_bookies: 'bookie list', few_bookies: 'bookie list',
  no_auditor: 'cluster status', auditor_silent: 'cluster status', repairs_paused: 'repair resume',
  loss_accepted: 'repair resume', entries_lost: 'repair list', no_live_copy: 'repair list',
  one_copy_left: 'repair list', under_replicated: 'repair list', misplaced: 'repair list',
  waiting_for_owner: 'repair list', no_target: 'repair list', repair_stuck: 'repair list',
  damaged_records: 'scrub status',
};
export const BOOKIE_COMMANDS = ['ledger list --bookie NAME', 'bookie show NAME', 'bookie ok-to-stop NAME'];
export const DRAIN_COMMANDS = ['bookie ok-to-stop NAME', 'bookie ok-to-remove NAME'];

// ---- values as text ----

const whole = new Intl.NumberFormat('en', { maximumFractionDigits: 0 });
// 99.5 and more have three digits once they are rounded, which two would show as a power of ten.
const digits = (value) => (value >= 99.5 || Number.isInteger(value) ? whole.format(value) : value.toPrecision(2));
const count = (value) => (value == null ? '–' : digits(value));
const rate = (value) => (value == null ? '–' : digits(value));
const share = (cores) => (cores == null ? '–' : `${digits(Math.round(cores * 100))} %`);
const time = (ns) => new Date(ns / 1e6).toLocaleTimeString('en-GB');
/** A time with its day, unless that is today. */
function moment(ns) {
  const at = new Date(ns / 1e6);
  return at.toDateString() === new Date().toDateString() ? time(ns) : `${at.toLocaleDateString('en-CA')} ${time(ns)}`;
}
function latency(s) {
  if (s == null) return '–';
  return s < 1e-3 ? `${digits(s * 1e6)} µs` : s < 1 ? `${digits(s * 1e3)} ms` : `${digits(s)} s`;
}
function bytes(value) {
  if (value == null) return '–';
  let unit = 0;
  for (; value >= 1024 && unit < 5; unit++) value /= 1024;
  return `${digits(value)} ${['B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB'][unit]}`;
}
function lasting(s) {
  for (const [size, unit] of [[86400, 'd'], [3600, 'h'], [60, 'min']]) if (s >= size) return `${digits(s / size)} ${unit}`;
  return `${digits(Math.max(0, s))} s`;
}

// ---- elements ----

const $ = (id) => document.getElementById(id);
function make(tag, text, kind) {
  const found = document.createElement(tag);
  if (text != null) found.textContent = text;
  if (kind) found.className = kind;
  return found;
}
function say(element, text, kind = '') {
  if (element.saidText !== text) element.textContent = element.saidText = text;
  if (element.saidKind !== kind) element.className = element.saidKind = kind;
}
/** A name as a cell: a long one is cut in the middle, and the whole is shown while the pointer or the focus is on it. */
const named = (name) => (name.length > 48 ? { text: `${name.slice(0, 23)}…${name.slice(-24)}`, kind: 'name', whole: name } : name);
const shaped = (level, word) => ({ text: `${SHAPES[level]} ${word}`, kind: level });

/** A name as a cell that leads to the view of what has it. */
const leading = (what, name) => ({ ...(name.length > 48 ? named(name) : { text: name, kind: 'name' }), to: `#${what}=${encodeURIComponent(name)}` });
/** Show a text in an element, or a link with it. */
function put(element, text, kind, to) {
  if (!to) { say(element, text, kind); return; }
  const link = element.firstElementChild || element.appendChild(make('a'));
  if (link.getAttribute('href') !== to) link.setAttribute('href', to);
  say(link, text, kind);
}
/** Show facts in a list of terms: names with texts or {text, kind}. */
function facts(list, rows) {
  const titles = rows.map(([name]) => name).join('|');
  if (list.titles !== titles) {
    list.titles = titles;
    list.replaceChildren(...rows.map(([name]) => {
      const group = make('div');
      group.append(make('dt', name), make('dd'));
      return group;
    }));
  }
  rows.forEach(([, value], at) => say(list.children[at].lastChild, value.text ?? `${value}`, value.kind || ''));
}

/** Show rows in a table: each is its key and its cells, texts or {text, kind, to}. What has not changed is not touched. */
function fill(table, caption, titles, rows) {
  if (!table.rowsByKey) {
    table.rowsByKey = new Map();
    table.append(make('caption'), make('thead'), make('tbody'));
  }
  const [captioned, head, body] = table.children;
  say(captioned, caption);
  if (table.titles !== titles.join('|')) {
    table.titles = titles.join('|');
    const row = make('tr');
    row.append(...titles.map((title) => {
      const cell = make('th', title.replace('#', ''), title.startsWith('#') ? 'num' : '');
      cell.scope = 'col';
      return cell;
    }));
    head.replaceChildren(row);
    body.replaceChildren();
    table.rowsByKey.clear();
  }
  const known = table.rowsByKey, kept = new Set();
  let before = null;
  for (const [key, cells] of rows) {
    let row = known.get(key);
    if (!row) {
      row = make('tr');
      row.append(...titles.map((title, at) => {
        const cell = make(at ? 'td' : 'th');
        if (!at) cell.scope = 'row';
        return cell;
      }));
      known.set(key, row);
    }
    kept.add(key);
    cells.forEach((cell, at) => {
      const { text, kind, whole = '', to } = typeof cell === 'object' ? cell : { text: cell, kind: '' };
      put(row.children[at], text, titles[at].startsWith('#') ? `num ${kind}`.trim() : kind, to);
      if (row.children[at].title !== whole) { row.children[at].title = whole; row.children[at].tabIndex = whole ? 0 : -1; }
    });
    const place = before ? before.nextSibling : body.firstChild;
    if (place !== row) body.insertBefore(row, place);
    before = row;
  }
  for (const [key, row] of known) if (!kept.has(key)) { row.remove(); known.delete(key); }
}

function copyable(command) {
  const found = make('span');
  const button = make('button', 'Copy');
  button.type = 'button';
  button.setAttribute('aria-label', `Copy ${command}`);
  button.addEventListener('click', async () => {
    try { await navigator.clipboard.writeText(command); say(button, 'Copied'); } catch { say(button, 'Select it, please'); }
  });
  found.append(make('code', command), ' ', button);
  return found;
}
const quoted = (word) => (/^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", `'\\''`)}'`);
/** Return a command as it runs here: with what it needs to reach the cluster. */
function commanded(command, name = '') {
  const words = command.replace(/( --bookie)? NAME/, ''), [, option = ''] = /( --bookie) NAME/.exec(command) || [];
  const whole = state.overview.command.replace('COMMAND', () => words);
  return words === command ? whole : `${whole}${option} ${quoted(name)}`;
}

// ---- the state, and how it is asked for ----

const state = { overview: null, bookies: [], loads: {}, own: null, log: null, records: null, types: null, series: { at: [], lines: new Map() }, events: [], token: '', needsToken: false };
const tags = new Map();
let lastSeen = 0, freshAt = performance.now(), timer = 0, busy = false, slowAt = -Infinity, lastEvent = 0;

/** Return what the address names after #: a kind of view, and a name. */
function chosen() {
  const [, what = '', name = ''] = /^#(bookie|log)=(.+)$/.exec(location.hash) || [];
  try { return [what, decodeURIComponent(name)]; } catch { return ['', '']; }
}

async function post(path, body) {
  const headers = { 'Content-Type': 'application/json', ...(state.token && { Authorization: `Bearer ${state.token}` }) };
  const answer = await fetch(`api/v1/${path}`, { method: 'POST', headers, body: JSON.stringify(body), signal: AbortSignal.timeout(STALE_MS) });
  const found = await answer.json();
  if (!answer.ok) throw Object.assign(new Error(found.detail), { unauthorized: answer.status === 401 || answer.status === 403 });
  return found;
}

async function get(path) {
  const kept = tags.get(path), headers = {};
  if (state.token) headers.Authorization = `Bearer ${state.token}`;
  if (kept) headers['If-None-Match'] = kept.tag;
  const answer = await fetch(`api/v1/${path}`, { headers, cache: 'no-store', signal: AbortSignal.timeout(STALE_MS) });
  if (answer.status === 304) return kept.body;
  if (!/json/.test(answer.headers.get('Content-Type'))) throw new Error(`status ${answer.status} without JSON, maybe of a proxy on the way`);
  const body = await answer.json();
  if (answer.status === 401) throw Object.assign(new Error(body.detail), { unauthorized: true });
  if (!answer.ok) throw new Error(body.detail);
  if (!path.includes('?')) tags.set(path, { tag: answer.headers.get('ETag'), body });
  return body;
}

export async function poll() {
  if (busy) return;
  busy = true;
  clearTimeout(timer);
  try {
    await ask();
    $('ask').hidden = !state.needsToken;
  } catch (error) {
    if (error.unauthorized) {
      say($('refused'), state.token ? error.message : '');
      $('ask').hidden = false;
    }
    state.trouble = error.message;
  } finally {
    busy = false;
    age();
    if (!document.hidden) timer = setTimeout(poll, POLL_MS);
  }
}

async function ask() {
  const series = state.series.at, slow = performance.now() - slowAt > SLOW_MS;
  const overview = await get('cluster'), cluster = overview.is_cluster;
  const nothing = Promise.resolve(null);
  const [what, name] = chosen();
  const [bookies, loads, own, types, space, added, events, logs, log, repairs, scrubs] = await Promise.all([
    cluster ? get('bookies') : nothing, cluster ? get('loads') : nothing, get('load'), get('types'), get('space'),
    get(`series?since=${series.length ? series[series.length - 1] : 0}`), get(`events?after=${lastEvent}`),
    slow ? get(`logs?${new URLSearchParams({ contains: $('log-filter').value })}`) : nothing,
    slow && what === 'log' ? get(`logs/${encodeURIComponent(name)}`).catch((error) => ({ trouble: error.message })) : nothing, slow && cluster ? get('repairs?limit=20') : nothing, slow && cluster ? get('scrubs') : nothing,
  ]);
  if (slow) slowAt = performance.now();
  update({ overview, bookies: bookies ? bookies.bookies : [], loads: loads || {}, own, types, space, logs, log, repairs, scrubs }, added, events);
}

/** Take in what was asked for, and show it. */
export function update(found, added, events) {
  for (const [name, value] of Object.entries(found)) if (value != null) state[name] = value;
  state.trouble = '';
  if (state.overview.seen_ns !== lastSeen) { lastSeen = state.overview.seen_ns; freshAt = performance.now(); }
  take(added);
  state.events = [...state.events, ...events.events].slice(-200);
  lastEvent = events.next;
  show();
  if (!state.ledgers) find();
}

function age() {
  const seconds = (performance.now() - freshAt) / 1000, stale = seconds * 1000 >= STALE_MS;
  const text = state.overview ? `as of ${moment(lastSeen)}` : '';
  if (stale) {
    document.body.dataset.stale = '';
    const why = state.trouble ? `: ${state.trouble}` : '';
    say($('seen'), `${SHAPES.bad} stale, ${state.overview ? `${text}, ` : ''}nothing new for ${Math.floor(seconds)} s${why}`, 'bad');
  } else {
    delete document.body.dataset.stale;
    say($('seen'), state.overview ? `${SHAPES.ok} live, ${text}` : '', 'ok');
  }
}

// ---- what is shown ----

function show() {
  const { overview } = state;
  for (const each of document.querySelectorAll('[data-of=cluster]')) each.hidden = !overview.is_cluster;
  say($('name'), overview.name);
  say($('location'), `${overview.is_cluster ? 'Cluster' : 'Store'} ${overview.id} at ${overview.location}`);
  showVerdict();
  if (overview.cluster) showCopies(overview.cluster);
  if (overview.is_cluster) { showBookies(); showWork(); }
  showTypes();
  showSpace();
  showProcesses();
  showLogs();
  showChosen();
  fill($('events'), 'The newest first', ['Time', 'Level', 'Event', 'Bookie', 'What happened'], [...state.events]
    .sort((a, b) => b.time_ns - a.time_ns || b.number - a.number).slice(0, EVENTS_SHOWN)
    .map((each) => [each.number, [moment(each.time_ns), shaped({ info: 'ok', warning: 'warn' }[each.level] || 'bad', each.level), each.event, each.bookie, each.message]]));
  draw();
}

function showVerdict() {
  const { overview } = state, { cluster } = overview;
  const level = cluster ? cluster.verdict : { ok: 'ok', failed: 'bad' }[overview.state] || 'warn';
  const word = cluster ? { ok: 'OK', warn: 'WARN', bad: 'BAD' }[level] : overview.state.replace('_', ' ').toUpperCase();
  const unseen = overview.trouble ? ', the metadata store is not reached' : '';
  say($('verdict'), `${SHAPES[level]} ${word}${unseen}`, level);
  document.title = `${SHAPES[level]} ${word} – ${overview.name} – pybk`;
  say($('auditor'), cluster ? (cluster.auditor ? `auditor: ${cluster.auditor}` : 'no auditor') : overview.is_cluster ? '' : 'a store');
  say($('paused'), cluster && cluster.paused_until_ns ? `repairs are paused until ${moment(cluster.paused_until_ns)}` : '', 'warn');
  const reasons = [...(cluster ? cluster.reasons : overview.reasons)];
  if (overview.trouble) reasons.unshift({ code: 'metadata_unreachable', text: overview.trouble });
  const shown = reasons.map((each) => `${each.code} ${each.text}`).join('\n');
  if ($('reasons').shown === shown) return;
  $('reasons').shown = shown;
  $('reasons').replaceChildren(...reasons.map((each) => {
    const item = make('li', each.text);
    item.append(' ', make('span', `(${each.code})`, 'quiet'));
    const command = cluster && COMMANDS[each.code];
    if (command) item.append(' ', copyable(commanded(command)));
    return item;
  }));
  if (!reasons.length) $('reasons').append(make('li', 'Nothing needs attention.'));
}

function showCopies(cluster) {
  const short = Object.values(cluster.short).reduce((sum, each) => sum + each, 0);
  const counted = state.types.types.filter((each) => each.open != null);
  const all = counted.reduce((sum, each) => sum + each.open + each.closed, 0);
  const full = short === 0 ? '100 %' : all ? `${(Math.floor((1 - Math.min(1, short / all)) * 1e4) / 100).toFixed(2)} %` : '–';
  const values = [['Full copies', full], ['Two left', cluster.short['2'] || 0], ['One left', cluster.short['1'] || 0], ['None runs', cluster.short['0'] || 0],
    ['More left', cluster.short.more || 0], ['Lost', cluster.lost.length], ['Misplaced', cluster.misplaced], ['No target', cluster.no_target.length],
    ['Stuck', cluster.stuck.length], ['Wait for their owner', cluster.waiting.length]];
  const list = $('copies');
  if (!list.children.length) {
    list.append(...values.map(([name]) => {
      const group = make('div');
      group.append(make('dt', name), make('dd'));
      return group;
    }));
  }
  const serious = new Set(['One left', 'None runs', 'Lost', 'Stuck']);
  values.forEach(([name, value], at) => say(list.children[at].lastChild, `${value}`, value && serious.has(name) ? 'bad' : ''));
  const { queued_bytes: queued, done_bytes: done } = cluster;
  $('progress').value = queued ? done / (done + queued) : cluster.held ? 0 : 1;
  const left = queued ? `${bytes(queued)} left, ${bytes(cluster.rate)}/s, ${cluster.eta_s == null ? 'no estimate yet' : `about ${lasting(cluster.eta_s)} more`}` : cluster.held ? 'nothing is copied yet' : 'nothing to copy';
  const waits = cluster.held ? [`${count(cluster.held)} ledgers lack copies and wait`, ...cluster.held_because] : cluster.holds.map((each) => `on hold: ${each}`);
  say($('repair'), [left, ...waits].join('; '));
}

function standing(each, limbo) {
  if (!each.registered) return each.state === 'drained' ? shaped('ok', 'drained, ended') : each.state === 'maintenance' ? shaped('warn', 'maintenance, does not run') : shaped('bad', 'does not run');
  if (limbo) return shaped('warn', 'in limbo');
  if (each.state !== 'active') return shaped('warn', each.state);
  return each.read_only ? shaped('warn', 'read-only') : shaped('ok', 'runs');
}

function showBookies() {
  const filter = $('filter').value.trim().toLowerCase(), order = { bad: 0, warn: 1, ok: 2 };
  const rows = state.bookies.map((each) => {
    const name = each.bookie.bookie_id, load = state.loads[name] || {}, how = standing(each, load.limbo_ledgers);
    const tiers = Object.entries(each.free_bytes).map(([tier, free]) => `${tier} ${bytes(free)}${each.capacity_bytes[tier] ? ` of ${bytes(each.capacity_bytes[tier])}` : ''}`);
    const { memory_bytes: memory, cpu } = load.process || {};
    return [name, [leading('bookie', name), how, each.location, each.version, rate(load.append_entries), latency(load.append_p99_s), latency(load.sync_p99_s), bytes(memory), share(cpu), count(load.limbo_ledgers), tiers.join(', ')]];
  }).filter(([, cells]) => !filter || cells.some((cell) => `${cell.whole || cell.text || cell}`.toLowerCase().includes(filter)));
  rows.sort((a, b) => order[a[1][1].kind] - order[b[1][1].kind] || (a[0] < b[0] ? -1 : 1));
  say($('shown'), rows.length === state.bookies.length ? `${rows.length} bookies` : `${rows.length} of ${state.bookies.length} bookies`);
  fill($('bookies'), 'Those that need attention first', ['Name', 'State', 'Location', 'Version', '#Appends/s', '#Append p99', '#Sync p99', '#Memory', '#CPU', '#In limbo', 'Free'], rows);
}

function showTypes() {
  const { types } = state, whose = { store: 'Rates of this store', client: 'Rates of this process alone: the HTTP ports of the bookies are not known' };
  say($('whose'), `${whose[types.whose] || `Rates of ${types.answering} bookies that answer: each copy counts, reads are requests, of no type; latencies are those of the slowest bookie`}.`, 'quiet');
  const row = (key, name, open, closed, each) => [key, [named(name || '(no type)'), count(open), count(closed), rate(each.append_entries), `${bytes(each.append_bytes)}/s`,
    latency(each.append_p50_s), latency(each.append_p99_s),
    ...(types.whose !== 'bookies' || key === 'all' ? [rate(each.read_entries), types.whose === 'bookies' ? '–' : `${bytes(each.read_bytes)}/s`, latency(each.read_p99_s)] : ['–', '–', '–'])]];
  const sum = (name) => (types.types.some((each) => each[name] != null) ? types.types.reduce((total, each) => total + (each[name] || 0), 0) : null);
  const all = row('all', 'all', sum('open'), sum('closed'), types.total);
  fill($('types'), 'The busiest first', ['Type', '#Open', '#Closed', '#Appends/s', '#Appended', '#p50', '#p99', '#Reads/s', '#Read', '#Read p99'],
    [all, ...types.types.map((each) => row(`type ${each.ledger_type}`, each.ledger_type, each.open, each.closed, each.rates))]);
}

function showSpace() {
  const days = (each) => (each.days_left == null ? 'does not fill, or not seen for a minute' : each.days_left < 1 ? shaped('bad', `${lasting(each.days_left * 86400)} left`)
    : each.days_left < 7 ? shaped('warn', `${digits(each.days_left)} days left`) : shaped('ok', `${digits(Math.floor(each.days_left))} days left`));
  fill($('space'), 'Days left if it fills as in the last quarter of an hour', [state.overview.is_cluster ? 'Tier' : 'Directory', '#Free', '#Of', '#Used', 'Until full'],
    state.space.map((each) => [each.name, [each.name, bytes(each.free_bytes), bytes(each.capacity_bytes),
      each.capacity_bytes ? `${digits(Math.round(100 * (1 - each.free_bytes / each.capacity_bytes)))} %` : '–', days(each)]]));
}

function showLogs() {
  if (!state.logs) return;
  say($('more-logs'), state.logs.next == null ? '' : `The first ${state.logs.logs.length} of them; pybk log list shows all.`);
  const rows = state.logs.logs.flatMap((each) => {
    const how = each.trouble ? shaped('bad', 'unreadable') : shaped('ok', each.sealed ? 'sealed' : each.open ? 'open' : 'closed');
    const log = [leading('log', each.name), how, `${each.first_seq} to ${each.end_seq - 1}`, count(each.ledgers), bytes(each.bytes)];
    const readers = each.subscriptions.length ? each.subscriptions : [null];
    return readers.map((reader, at) => [`${each.name}\n${at}`, [...(at ? [leading('log', each.name), '', '', '', ''] : log), reader ? named(reader.name) : each.trouble, reader ? `at most ${count(reader.backlog_max)}` : '']]);
  });
  fill($('logs'), 'What the closed ledgers of each log hold; records of an open ledger are not counted', ['Log', 'State', 'Records', '#Ledgers', '#Size', 'Subscription', '#Backlog'], rows);
}

/** Show what each process uses, and how it reaches the metadata store. */
function showProcesses() {
  const { overview } = state;
  say($('metadata'), !overview.is_cluster ? '' : overview.trouble ? `${SHAPES.bad} Not reached: ${overview.trouble}` : `${SHAPES.ok} ${overview.location} answers.`, overview.trouble ? 'bad' : 'ok');
  const rows = [['this process', state.own?.process], ...state.bookies.map((each) => [each.bookie.bookie_id, (state.loads[each.bookie.bookie_id] || {}).process])];
  fill($('processes'), overview.is_cluster ? 'Of bookies whose HTTP ports are known; 100 % CPU is one core' : '100 % CPU is one core',
    ['Process', '#Memory', '#CPU', '#Client sessions', '#Metadata requests/s', '#Metadata p99', '#Lost metadata sessions'],
    rows.map(([name, each], at) => [`${at ? 'bookie' : 'own'} ${name}`, [at ? leading('bookie', name) : name, bytes(each?.memory_bytes), share(each?.cpu), count(each?.sessions), rate(each?.metadata_requests), latency(each?.metadata_p99_s), count(each?.session_losses)]]));
}

/** Show the bookie or the log that the address names. */
function showChosen() {
  const [what, name] = chosen(), bookie = what === 'bookie' && state.bookies.find((each) => each.bookie.bookie_id === name);
  $('one-bookie').hidden = what !== 'bookie';
  $('one-log').hidden = what !== 'log';
  if (what === 'bookie') showBookie(name, bookie);
  if (what === 'log') showLog(name);
}

function showBookie(name, each) {
  say($('bookie-title'), `Bookie ${name}`);
  say($('no-bookie'), each ? '' : 'It does not belong to the cluster.', 'bad');
  $('bookie-commands').hidden = !each;
  if (!each) { facts($('bookie-facts'), []); fill($('bookie-tiers'), '', ['Tier', '#Free', '#Of', 'Device'], []); return; }
  const load = state.loads[name] || {}, { process } = load;
  facts($('bookie-facts'), [['State', standing(each, load.limbo_ledgers)], ['Since', each.since_ns ? moment(each.since_ns) : '–'], ['Addresses', each.addresses.join(', ') || '–'], ['Location', each.location || '–'], ['Version', each.version || '–'],
    ['Appends/s', rate(load.append_entries)], ['Append p99', latency(load.append_p99_s)], ['Sync p99', latency(load.sync_p99_s)], ['In limbo', count(load.limbo_ledgers)], ['Memory', bytes(process?.memory_bytes)], ['CPU', share(process?.cpu)],
    ['Client sessions', count(process?.sessions)], ['Metadata p99', latency(process?.metadata_p99_s)], ['Lost metadata sessions', count(process?.session_losses)]]);
  fill($('bookie-tiers'), 'Its tiers', ['Tier', '#Free', '#Of', 'Device'], Object.entries(each.free_bytes).map(([tier, free]) => [tier, [tier, bytes(free), bytes(each.capacity_bytes[tier]), each.devices[tier] || '–']]));
  if ($('bookie-commands').shown !== name) {
    $('bookie-commands').shown = name;
    $('bookie-commands').replaceChildren(...BOOKIE_COMMANDS.map((command) => {
      const item = make('li');
      item.append(copyable(commanded(command, name)));
      return item;
    }));
  }
}

function showLog(name) {
  const found = state.log?.log?.name === name ? state.log : null, each = found?.log;
  say($('log-title'), `Log ${name}`);
  const trouble = state.log?.trouble || each?.trouble || '';
  say($('no-log'), found || trouble ? trouble : 'Asked for …', trouble ? 'bad' : '');
  $('peek').hidden = !each || Boolean(each.trouble) || !state.overview.opens_logs;
  say($('no-peek'), each && !state.overview.opens_logs ? 'Records are shown only where the interface was given the secret of the log.' : '', 'quiet');
  facts($('log-facts'), !each || each.trouble ? [] : [['State', each.sealed ? 'sealed' : each.open ? 'open' : 'closed'], ['Records', `${each.first_seq} to ${each.end_seq - 1}`], ['Size', bytes(each.bytes)], ['Ledgers', count(each.ledgers)], ['Subscriptions', count(each.subscriptions.length)]]);
  fill($('log-subscriptions'), 'Its durable subscriptions', ['Subscription', '#Needs from', '#Backlog'], (each?.subscriptions || []).map((reader) => [reader.name, [named(reader.name), `${reader.needs_from}`, `at most ${count(reader.backlog_max)}`]]));
  fill($('log-ledgers'), 'Its newest ledgers', ['Ledger', '#First record', '#Last record', '#Size', 'Created', 'Closed'], (found?.segments || []).map((one) => [one.ledger_id, [String(one.ledger_id), one.first_seq ?? '–', one.last_seq ?? '–', one.closed_ns ? bytes(one.bytes) : '–', moment(one.created_ns), one.closed_ns ? moment(one.closed_ns) : 'open']]));
  const lines = found ? found.lags.lines.map((line) => ({ name: named(line.name).text || line.name, values: line.backlog_max })) : [];
  LAGS.element?.toggleAttribute('hidden', !lines.length);
  if (lines.length) drawChart(LAGS, found.lags.at_ms, lines);
  showRecords(name);
}

const excerpt = (each) => (each ? `${each.text ?? `hex ${each.hex}`}${each.size > (each.text == null ? each.hex.length / 2 : new TextEncoder().encode(each.text).length) ? ' …' : ''}` : '–');
function showRecords(name) {
  const { records } = state, shown = records?.name === name ? records.found.records : [];
  $('records').parentElement.hidden = !shown.length;
  fill($('records'), shown.length ? `Records ${shown[0].seq} to ${shown[shown.length - 1].seq} of ${records.found.first_seq} to ${records.found.last_seq}` : '', ['#Record', 'Time', 'Key', '#Bytes', 'Beginning'],
    shown.map((each) => [each.seq, [`${each.seq}`, moment(each.time_ns), { text: excerpt(each.key), kind: 'data' }, count(each.data.size), { text: excerpt(each.data), kind: 'data' }]]));
}

/** Ask for records of the log that is shown; they are read once, and not polled. */
async function peek() {
  const [, name] = chosen(), first = $('first').value.trim();
  try {
    state.records = { name, found: await post(`logs/${encodeURIComponent(name)}:peek`, { limit: RECORDS_SHOWN, ...(first && { first: Number(first) }) }) };
    say($('peeked'), state.records.found.records.length ? '' : 'It has no such records.');
  } catch (error) {
    state.records = null;
    say($('peeked'), error.message, 'bad');
    if (error.unauthorized) { state.needsToken = true; say($('refused'), 'Records are shown for a token with the scope operate.'); $('ask').hidden = false; $('token').focus(); }
  }
  showRecords(name);
}

/** Ask for the ledger with an id, or for a page of those of a type and a state, and show them; they are not polled. */
async function find(after = -1) {
  const wanted = $('wanted').value.trim(), inState = $('in-state').value, byId = /^[0-9]+$/.test(wanted);
  const page = new URLSearchParams({ after, limit: LEDGERS_SHOWN, ...(wanted && { ledger_type: wanted }), ...(inState && { state: inState }) });
  try {
    state.ledgers = byId ? { ledgers: [await get(`ledgers/${wanted}`)], next: null } : await get(`ledgers?${page}`);
    const { length } = state.ledgers.ledgers;
    say($('found'), `${length ? count(length) : 'No'} ${length === 1 ? 'ledger' : 'ledgers'}${after < 0 ? '' : ` after ${after}`}${state.ledgers.next == null ? '' : ', and more on the next page'}.`);
  } catch (error) {
    state.ledgers = { ledgers: [], next: null };
    say($('found'), error.message, 'bad');
  }
  showLedgers(byId);
}

function showLedgers(whole) {
  const { ledgers, next } = state.ledgers, [one] = whole ? ledgers : [];
  $('following').hidden = next == null;
  fill($('ledgers'), 'By id; of an open ledger its bookies alone may know the end', ['Ledger', 'State', 'Type', 'Created', '#Last entry', '#Size', 'Copies', 'Bookies of the last fragment'],
    ledgers.map((each) => [each.ledger_id, [String(each.ledger_id), shaped(each.state === 'in_recovery' ? 'warn' : 'ok', each.state.replace('_', ' ')), named(each.ledger_type || '(no type)'), moment(each.created_ns),
      each.last_add_confirmed == null ? '–' : each.last_add_confirmed < 0 ? 'none' : String(each.last_add_confirmed), bytes(each.length), `${each.ack_quorum} of ${each.write_quorum} in ${each.ensemble_size}`,
      each.fragments.length ? each.fragments[each.fragments.length - 1].bookies.join(', ') : '–']]));
  $('fragments').parentElement.hidden = !one || !one.fragments.length;
  if (one) fill($('fragments'), `The fragments of ledger ${one.ledger_id}`, ['#First entry', 'Bookies'], one.fragments.map((each) => [each.first_entry_id, [String(each.first_entry_id), each.bookies.join(', ')]]));
}

function showWork() {
  const rows = [], drains = state.bookies.filter((each) => each.state === 'draining' || each.state === 'maintenance');
  for (const each of drains) {
    const name = each.bookie.bookie_id;
    rows.push([`bookie ${name}`, [each.state, `bookie ${name}`, shaped('warn', each.until_ns ? `until ${moment(each.until_ns)}` : `since ${moment(each.since_ns)}`),
      DRAIN_COMMANDS.map((command) => commanded(command, name)).join(' ; ')]]);
  }
  for (const each of state.repairs ? state.repairs.repairs : []) {
    rows.push([`ledger ${each.ledger_id} ${each.bookie}`, ['repair', `ledger ${each.ledger_id} of bookie ${each.bookie}`, shaped(each.state === 'queued' ? 'warn' : 'bad', each.state),
      `${each.reason}, ${bytes(each.size_bytes)}, ${each.tries} tries${each.error ? `: ${each.error}` : ''}`]]);
  }
  for (const each of state.scrubs || []) {
    if (each.damaged.length) rows.push([`scrub ${each.name}`, ['scrub', each.name, shaped('bad', 'damaged'), `${each.damaged.length} damaged records`]]);
  }
  const { repairs } = state, { cluster } = state.overview;
  if (cluster && cluster.held) {
    rows.push(['held', ['repair', `${count(cluster.held)} ledgers`, shaped('warn', 'held'), cluster.held_because.join('; ')]]);
  }
  say($('waiting'), repairs && repairs.total > repairs.repairs.length ? `${count(repairs.total)} repairs wait; the most urgent ones:` : rows.length ? '' : 'Nothing is under way.');
  fill($('work'), 'Drains, maintenance, repairs and damage', ['What', 'Of', 'State', 'More'], rows);
}

// ---- charts ----

const CHARTS = [
  { title: 'Appends a second', names: ['append_entries'], text: rate },
  { title: 'Append latency', names: ['append_p50_s', 'append_p99_s'], text: latency },
  { title: 'Reads a second', names: ['read_entries'], text: rate },
  { title: 'Read latency', names: ['read_p99_s'], text: latency },
];
const KINDS = { append_p50_s: 'p50', append_p99_s: 'p99', read_p99_s: 'p99' };

/** Add what came since the last time, and forget what is older than the window. */
function take(added) {
  const { series } = state, news = added.at_ms.length;
  if (!news) return;
  const had = series.at.length;
  series.at.push(...added.at_ms);
  for (const line of added.lines) {
    const key = `${line.by}\n${line.name}`;
    if (!series.lines.has(key)) series.lines.set(key, { by: line.by, name: line.name, values: {} });
    const { values } = series.lines.get(key);
    for (const name of CHARTS.flatMap((chart) => chart.names)) (values[name] ||= Array(had).fill(null)).push(...line[name]);
  }
  const gone = series.at.findIndex((at) => at > series.at[series.at.length - 1] - WINDOW_MS);
  series.at.splice(0, gone);
  for (const [key, { values }] of series.lines) {
    for (const each of Object.values(values)) {
      while (each.length < had + news) each.push(null);
      each.splice(0, gone);
    }
    if (Object.values(values).every((each) => each.every((value) => value == null))) series.lines.delete(key);
  }
}

/** Return the lines of a chart: their name, and their values. */
function linesOf(chart) {
  const by = $('by').value, size = ({ values }) => values.append_entries.concat(values.read_entries).reduce((sum, each) => sum + (each || 0), 0);
  const found = [...state.series.lines.values()].filter((each) => each.by === by);
  if (by === 'all') return found.flatMap((each) => chart.names.map((name) => ({ name: KINDS[name] || 'all', values: each.values[name] })));
  const name = chart.names[chart.names.length - 1], kind = KINDS[name] ? `, ${KINDS[name]}` : '';
  return found.map((each) => [size(each), each]).sort((a, b) => b[0] - a[0]).slice(0, LINES_MAX)
    .map(([, each]) => ({ name: `${named(each.name).text || each.name || '(no type)'}${kind}`, values: each.values[name] }));
}

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** The chart of a log's view. */
const LAGS = { title: 'Backlog of subscriptions, at most', text: count, into: 'lags' };

function begin(chart) {
  chart.element = make('div', null, 'chart');
  chart.plot = make('div', null, 'plot');
  chart.details = make('details');
  chart.table = make('table');
  const scroll = make('div', null, 'scroll');
  scroll.tabIndex = 0;
  scroll.setAttribute('role', 'region');
  scroll.setAttribute('aria-label', `${chart.title}, as a table`);
  scroll.append(chart.table);
  chart.details.append(make('summary', `${chart.title} as a table`), scroll);
  chart.details.addEventListener('toggle', () => tabulate(chart));
  chart.element.append(make('h3', chart.title), chart.plot, chart.details);
  $(chart.into || 'charts').append(chart.element);
  new ResizeObserver(() => {
    const width = chart.plot.clientWidth;
    if (chart.drawn && width && width !== chart.drawn.width) chart.drawn.setSize({ width, height: 180 });
  }).observe(chart.plot);
}

function draw() {
  for (const chart of CHARTS) drawChart(chart, state.series.at, linesOf(chart));
}

/** Draw a chart: when, milliseconds, and its lines. */
function drawChart(chart, times, lines) {
  if (!chart.element) begin(chart);
  chart.times = times;
  chart.lines = lines;
  const shown = `${lines.map((each) => each.name).join('\n')}\n${document.documentElement.dataset.theme}`;
  const data = [times.map((at) => at / 1000), ...lines.map((each) => each.values)];
  if (chart.shown !== shown) {
    chart.shown = shown;
    chart.drawn?.destroy();
    const axis = { stroke: colour('--text'), grid: { stroke: colour('--edge'), width: 1 }, ticks: { stroke: colour('--edge'), width: 1 } };
    chart.drawn = new uPlot({
      width: Math.max(200, chart.plot.clientWidth), height: 180, cursor: { drag: { x: false, y: false } },
      axes: [{ ...axis, space: 80, values: (_, ticks) => ticks.map((each) => time(each * 1e9)) }, { ...axis, size: 70, values: (_, ticks) => ticks.map((each) => chart.text(each)) }],
      series: [{ value: (_, at) => (at == null ? '' : time(at * 1e9)) }, ...lines.map((each, at) => ({
        label: each.name, stroke: colour(`--l${at}`), width: 1.5, dash: at % 2 ? [6, 3] : undefined, spanGaps: false, value: (_, value) => chart.text(value),
      }))],
    }, data, chart.plot);
  } else chart.drawn.setData(data);
  tabulate(chart);
}

/** Show a chart as a table: the highest value of each line in each minute. */
function tabulate(chart) {
  const { lines, times } = chart, minutes = new Map();
  if (!chart.details.open || !lines) return;
  times.forEach((at, index) => {
    const minute = Math.floor(at / 60000);
    if (!minutes.has(minute)) minutes.set(minute, lines.map(() => null));
    const highest = minutes.get(minute);
    lines.forEach((each, line) => { if (each.values[index] != null) highest[line] = Math.max(highest[line] ?? 0, each.values[index]); });
  });
  fill(chart.table, 'The highest value in each minute', ['Minute', ...lines.map((each) => `#${each.name}`)],
    [...minutes].reverse().map(([minute, values]) => [minute, [new Date(minute * 60000).toLocaleTimeString('en-GB', { hour: '2-digit', minute: '2-digit' }), ...values.map(chart.text)]]));
}

// ---- the theme, and the beginning ----

const THEMES = { auto: 'as the system', light: 'light', dark: 'dark' };
const dark = matchMedia('(prefers-color-scheme: dark)');
let theme = 'auto';
try { theme = localStorage.getItem('pybk-theme') || theme; } catch { /* a browser may keep nothing */ }
function paint() {
  if (!(theme in THEMES)) theme = 'auto';
  document.documentElement.dataset.theme = theme === 'auto' ? (dark.matches ? 'dark' : 'light') : theme;
  say($('theme'), `Theme: ${THEMES[theme]}`);
  if (state.types) { draw(); showChosen(); }
}
dark.addEventListener('change', paint);
$('theme').addEventListener('click', () => {
  const names = Object.keys(THEMES);
  theme = names[(names.indexOf(theme) + 1) % names.length];
  try { localStorage.setItem('pybk-theme', theme); } catch { /* it is lost at the next start then */ }
  paint();
});
$('filter').addEventListener('input', showBookies);
$('log-filter').addEventListener('change', () => { slowAt = -Infinity; poll(); });
$('find').addEventListener('submit', (event) => {
  event.preventDefault();
  find();
});
addEventListener('hashchange', () => {
  const [what] = chosen(), section = what && $(`one-${what}`);
  state.log = state.records = null;
  if (!state.overview) return;
  showChosen();
  if (section) { section.focus(); section.scrollIntoView(); }
  slowAt = -Infinity;
  poll();
});
$('peek').addEventListener('submit', (event) => {
  event.preventDefault();
  peek();
});
$('following').addEventListener('click', () => find(state.ledgers.next));
$('by').addEventListener('change', draw);
$('ask').addEventListener('submit', (event) => {
  event.preventDefault();
  state.token = $('token').value.trim();
  state.needsToken = false;
  poll();
});
document.addEventListener('visibilitychange', () => {
  clearTimeout(timer);
  if (!document.hidden) poll();
});
setInterval(age, 1000);
paint();
poll();
