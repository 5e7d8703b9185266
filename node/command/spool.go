// SPDX-License-Identifier: Apache-2.0

package command

import (
	"encoding/binary"
	"errors"
	"io"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// What output may take on disk. The beginning goes first, offsets stay true.
const (
	perCommand = 64 << 20
	perSandbox = 256 << 20
	patience   = time.Second
	trimStep   = 4 << 20 // how much is dropped at once, so that a hole is not punched for every write
)

// Spool keeps output in a directory that the sandbox cannot reach. Programs write into pipes, the daemon moves what
// comes to a file at once, and every reader reads the file at its own pace: nobody waits for a slow client.
//
// Per command there is ID.log, all bytes in the order they came, at their true offsets (what is dropped becomes a
// hole), and, when it wrote to both streams, ID.idx: 8 bytes little endian for every change, offset<<1 | stream.
type Spool struct {
	dir               *os.File
	commandMax, total int64
	used              atomic.Int64

	mu   sync.Mutex
	logs []*Log // oldest first
}

func newSpool(dir *os.File) *Spool {
	return &Spool{dir: dir, commandMax: perCommand, total: perSandbox}
}

// open opens a file of the spool, refusing whatever is not a plain file.
func (s *Spool) open(name string, flags int) (*os.File, error) {
	for {
		fd, err := unix.Openat(int(s.dir.Fd()), name, flags|unix.O_NOFOLLOW|unix.O_CLOEXEC|unix.O_NONBLOCK|unix.O_NOCTTY, 0o600)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return nil, &os.PathError{Op: "open", Path: name, Err: err}
		}
		var st unix.Stat_t
		if err := unix.Fstat(fd, &st); err != nil || st.Mode&unix.S_IFMT != unix.S_IFREG {
			_ = unix.Close(fd)
			return nil, &os.PathError{Op: "open", Path: name, Err: errors.Join(errors.New("not a regular file"), err)}
		}
		return os.NewFile(uintptr(fd), name), nil
	}
}

func (s *Spool) remove(name string) { _ = unix.Unlinkat(int(s.dir.Fd()), name, 0) }

// newLog makes room for the output of a command. Files appear with the first byte.
func (s *Spool) newLog(name string) *Log {
	l := &Log{spool: s, name: name}
	s.mu.Lock()
	s.logs = append(s.logs, l)
	s.mu.Unlock()
	return l
}

// forget removes a log and its files.
func (s *Spool) forget(l *Log) {
	s.mu.Lock()
	if i := slices.Index(s.logs, l); i >= 0 {
		s.logs = slices.Delete(s.logs, i, i+1)
	}
	s.mu.Unlock()
	l.drop()
	// Whoever still has them open can go on.
	s.remove(l.name + ".log")
	s.remove(l.name + ".idx")
}

// sweep removes the output of commands that are not known.
func (s *Spool) sweep(known func(id string) bool) {
	// A descriptor of its own: reading moves the position.
	fd, err := unix.Openat(int(s.dir.Fd()), ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return
	}
	dir := os.NewFile(uintptr(fd), "spool")
	defer dir.Close()
	names, _ := dir.Readdirnames(-1)
	for _, name := range names {
		id, kind, _ := strings.Cut(name, ".")
		if (kind == "log" || kind == "idx") && validID(id) && !known(id) {
			s.remove(name)
		}
	}
}

// balance brings the whole below its limit: the oldest of the finished commands lose their output first, then the
// largest of the running ones loses its beginning. It must not be called with a log locked.
func (s *Spool) balance() {
	if s.used.Load() <= s.total {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, l := range s.logs {
		if s.used.Load() <= s.total {
			return
		}
		if l.isFinished() {
			l.drop()
		}
	}
	for s.used.Load() > s.total {
		var largest *Log
		var size int64
		for _, l := range s.logs {
			if n := l.size(); n > size {
				largest, size = l, n
			}
		}
		before := s.used.Load()
		if largest == nil {
			return
		}
		if largest.shrink(trimStep); s.used.Load() >= before {
			return
		}
	}
}

// Log is the output of one command.
type Log struct {
	spool *Spool
	name  string

	mu         sync.Mutex
	file, idx  *os.File // open while the command runs or somebody reads
	refs       int      // readers
	base, end  int64    // offsets of the first byte kept and of the next to come
	stream     Stream   // of the last byte
	switches   int64    // entries ever written to idx
	firstEntry int64    // first of them that still matters
	baseStream Stream   // stream in force at base
	count      [2]int64 // bytes ever written to each stream
	dropped    [2]int64 // those of them before base
	finished   bool     // the command has ended and all it wrote is here
	finishedAt int64    // end at that moment; leftovers of the command may still add to it
	writers    int      // pipes that may still bring something
	failed     error    // why bytes could not be stored
	readers    []*Reader
	moved      chan struct{} // closed when a reader goes on; nil while nobody waits for that
}

// append stores output and wakes the readers. It never fails for the program: what cannot be stored is lost, and
// that is said at the end.
func (l *Log) append(s Stream, data []byte) {
	l.mu.Lock()
	if l.failed == nil {
		// After a failure nothing more is stored: a gap in the middle would make offsets lie.
		l.failed = l.store(s, data)
	}
	l.wake()
	l.mu.Unlock()
	l.spool.balance()
	l.courtesy()
}

// courtesy holds a program back for a client that follows it and does read, only slower than the program writes:
// without it such a client would lose what a terminal would show. A client that takes nothing for patience has lost
// that claim for good, so no program waits longer than this for anyone.
func (l *Log) courtesy() {
	for {
		l.mu.Lock()
		var slow *Reader
		for _, r := range l.readers {
			if !r.beyond && !r.stalled && l.end-r.off > l.spool.commandMax*3/4 {
				slow = r
			}
		}
		if slow == nil {
			l.mu.Unlock()
			return
		}
		if l.moved == nil {
			l.moved = make(chan struct{})
		}
		moved := l.moved
		l.mu.Unlock()
		timer := time.NewTimer(patience)
		select {
		case <-moved:
		case <-timer.C:
			l.mu.Lock()
			slow.stalled = true
			l.mu.Unlock()
		}
		timer.Stop()
	}
}

// advanced tells courtesy that a reader went on or away. Called with the lock held.
func (l *Log) advanced() {
	if l.moved != nil {
		close(l.moved)
		l.moved = nil
	}
}

func (l *Log) store(s Stream, data []byte) (err error) {
	if l.file == nil {
		if l.file, err = l.spool.open(l.name+".log", unix.O_RDWR|unix.O_CREAT); err != nil {
			return err
		}
	}
	if s != l.stream {
		if l.idx == nil {
			if l.idx, err = l.spool.open(l.name+".idx", unix.O_RDWR|unix.O_CREAT); err != nil {
				return err
			}
		}
		var entry [8]byte
		binary.LittleEndian.PutUint64(entry[:], uint64(l.end)<<1|uint64(s))
		if _, err = l.idx.WriteAt(entry[:], l.switches*8); err != nil {
			return err
		}
		l.switches++
		l.stream = s
		l.spool.used.Add(8)
	}
	if _, err = l.file.WriteAt(data, l.end); err != nil {
		return err
	}
	l.end += int64(len(data))
	l.count[s] += int64(len(data))
	l.spool.used.Add(int64(len(data)))
	if over := l.sizeLocked() - l.spool.commandMax; over > 0 {
		return l.trim(min(l.end, l.base+max(over, min(trimStep, l.spool.commandMax/4))))
	}
	return nil
}

// trim drops everything before offset to. Called with the lock held.
func (l *Log) trim(to int64) error {
	if to <= l.base {
		return nil
	}
	before := l.sizeLocked()
	// Entries at or before the new base tell which stream is in force there and are not needed after that.
	for l.idx != nil && l.firstEntry < l.switches {
		at, s, err := l.change(l.firstEntry)
		if err != nil || at > to {
			break
		}
		l.dropped[l.baseStream] += at - l.base
		l.base, l.baseStream = at, s
		l.firstEntry++
	}
	l.dropped[l.baseStream] += to - l.base
	err := errors.Join(punch(l.idx, l.firstEntry*8), punch(l.file, to))
	l.base = to
	l.spool.used.Add(l.sizeLocked() - before)
	return err
}

// change reads an entry of the index: where the stream changes, and to which. Called with the lock held, because entries
// that are dropped read as zero.
func (l *Log) change(entry int64) (at int64, s Stream, err error) {
	var b [8]byte
	_, err = l.idx.ReadAt(b[:], entry*8)
	v := binary.LittleEndian.Uint64(b[:])
	return int64(v >> 1), Stream(v & 1), err
}

// punch frees the beginning of a file up to an offset. On a filesystem that cannot do it the log stops to grow.
func punch(f *os.File, to int64) error {
	if f == nil || to <= 0 {
		return nil
	}
	return unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, to)
}

func (l *Log) sizeLocked() int64 { return l.end - l.base + 8*(l.switches-l.firstEntry) }

func (l *Log) size() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.sizeLocked()
}

func (l *Log) isFinished() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.finished
}

func (l *Log) shrink(by int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.trim(min(l.end, l.base+by)); err != nil && l.failed == nil {
		l.failed = err
	}
}

// drop removes what is stored; offsets stay.
func (l *Log) drop() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.end == l.base && l.switches == 0 {
		return
	}
	if l.file == nil { // closed, so nobody will write: the files can go
		before := l.sizeLocked()
		l.base, l.firstEntry, l.baseStream, l.dropped = l.end, l.switches, l.stream, l.count
		l.spool.used.Add(l.sizeLocked() - before)
		l.spool.remove(l.name + ".log")
		l.spool.remove(l.name + ".idx")
		return
	}
	_ = l.trim(l.end)
}

// opened counts the pipes that will bring output.
func (l *Log) opened(writers int) {
	l.mu.Lock()
	l.writers += writers
	l.mu.Unlock()
}

// writerGone says that a pipe is at its end.
func (l *Log) writerGone() {
	l.mu.Lock()
	l.writers--
	l.release()
	l.mu.Unlock()
}

// extent gives the number of bytes written so far, how many of them are gone, and what kept more from being stored.
func (l *Log) extent() (end, lost int64, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.end, l.base, l.failed
}

// finish says that the command's own output ends at that offset.
func (l *Log) finish(end int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.finished, l.finishedAt = true, end
	l.wake()
	l.release()
}

// recall takes over the files of an earlier run of the daemon, which had written so many bytes and dropped so many.
func (l *Log) recall(output, lost int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.finished = true
	l.base, l.end, l.finishedAt = output, output, output
	l.count[Stdout], l.dropped[Stdout] = output, output
	f, err := l.spool.open(l.name+".log", unix.O_RDONLY)
	if err != nil {
		return
	}
	defer f.Close()
	if l.end, err = f.Seek(0, io.SeekEnd); err != nil {
		return
	}
	l.finishedAt = l.end
	// Before it is the hole of what was dropped; the hole ends with a page, what was dropped need not.
	l.base = min(lost, l.end)
	if data, err := f.Seek(0, unix.SEEK_DATA); err == nil {
		l.base = max(l.base, data)
	}
	// How much of what is gone was which is not known any more.
	l.dropped, l.count = [2]int64{Stdout: l.base}, [2]int64{Stdout: l.base}
	l.recallIndex()
	l.spool.used.Add(l.sizeLocked())
}

// recallIndex is the part of recall that is about the streams.
func (l *Log) recallIndex() {
	counted := l.base // up to here
	if idx, err := l.spool.open(l.name+".idx", unix.O_RDONLY); err == nil {
		defer idx.Close()
		l.idx = idx
		defer func() { l.idx = nil }()
		size, _ := idx.Seek(0, io.SeekEnd)
		l.switches = size / 8
	}
	for entry := range l.switches {
		at, s, err := l.change(entry)
		if err != nil || at > l.end {
			l.switches = entry
			break
		}
		if at <= l.base {
			// Also those in the hole, which are zero. Streams alternate, so the next one tells what is in force at base.
			l.firstEntry, l.baseStream, l.stream = entry+1, s, s
			continue
		}
		if counted == l.base {
			l.baseStream, l.stream = 1-s, 1-s
		}
		l.count[l.stream] += at - counted
		counted, l.stream = at, s
	}
	l.count[l.stream] += l.end - counted
}

// release closes the files when neither a writer nor a reader is left.
func (l *Log) release() {
	if l.writers > 0 || l.refs > 0 || !l.finished {
		return
	}
	for _, f := range []**os.File{&l.file, &l.idx} {
		if *f != nil {
			_ = (*f).Close()
			*f = nil
		}
	}
}

func (l *Log) wake() {
	for _, r := range l.readers {
		select {
		case r.ready <- struct{}{}:
		default:
		}
	}
}

// Reader reads a log from an offset on and can wait for more.
type Reader struct {
	log     *Log
	off     int64
	stream  Stream // at off
	entry   int64  // next index entry to look at
	entries []byte // those read ahead, from entry on
	stalled bool   // did not read when it was waited for
	beyond  bool   // also what leftovers of a finished command write
	filter  bool   // only the stream wanted
	wanted  Stream
	ready   chan struct{}
}

// follow makes a reader that starts at an offset. With beyond it does not stop where the command ended but also
// gives what processes it left behind have written since. Close it.
func (l *Log) follow(off int64, beyond bool) (*Reader, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.file == nil && l.end > l.base {
		// Nobody had it open; the record says that there is something.
		f, err := l.spool.open(l.name+".log", unix.O_RDWR)
		if err != nil {
			return nil, err
		}
		l.file = f
		if l.switches > 0 {
			if l.idx, err = l.spool.open(l.name+".idx", unix.O_RDWR); err != nil {
				_ = l.file.Close()
				l.file = nil
				return nil, err
			}
		}
	}
	l.refs++
	r := &Reader{log: l, off: off, beyond: beyond, ready: make(chan struct{}, 1)}
	l.readers = append(l.readers, r)
	if err := r.locate(); err != nil {
		l.gone(r)
		return nil, err
	}
	return r, nil
}

// followStream is follow for the bytes of one stream, beginning with the one that has that number in it.
func (l *Log) followStream(s Stream, number int64) (*Reader, error) {
	r, err := l.follow(0, true)
	if err != nil {
		return nil, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	r.filter, r.wanted = true, s
	if r.off, err = l.place(s, number); err == nil {
		err = r.locate()
	}
	if err != nil {
		l.gone(r)
		return nil, err
	}
	return r, nil
}

// place gives the offset of a byte of a stream. Called with the lock held.
func (l *Log) place(s Stream, number int64) (int64, error) {
	passed, at, in := l.dropped[s], l.base, l.baseStream
	buf := make([]byte, 0, 4096)
	for entry := l.firstEntry; entry < l.switches; entry++ {
		if len(buf) == 0 {
			buf = buf[:8*min(l.switches-entry, int64(cap(buf)/8))]
			if _, err := l.idx.ReadAt(buf, entry*8); err != nil {
				return 0, err
			}
		}
		v := binary.LittleEndian.Uint64(buf)
		if buf = buf[8:]; len(buf) == 0 {
			buf = make([]byte, 0, 4096)
		}
		next := int64(v >> 1)
		if in == s {
			if number < passed+next-at {
				break
			}
			passed += next - at
		}
		at, in = next, Stream(v&1)
	}
	if in == s {
		at += max(0, number-passed)
	}
	return at, nil
}

// extentOf is extent for one stream.
func (l *Log) extentOf(s Stream) (end, lost int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.count[s], l.dropped[s]
}

// own gives where the command's own output ends, and whether that is known already.
func (l *Log) own() (end int64, finished bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.finished {
		return l.finishedAt, true
	}
	return l.end, false
}

// Close ends the reading.
func (r *Reader) Close() {
	r.log.mu.Lock()
	defer r.log.mu.Unlock()
	r.log.gone(r)
}

// gone takes a reader off. Called with the lock held.
func (l *Log) gone(r *Reader) {
	if i := slices.Index(l.readers, r); i >= 0 {
		l.readers = slices.Delete(l.readers, i, i+1)
		l.refs--
		l.advanced()
		l.release()
	}
}

// locate finds the stream in force at the reader's offset without passing all changes before it. Called with the lock
// held.
func (r *Reader) locate() error {
	l := r.log
	first, behind := l.firstEntry, l.switches
	r.entry, r.entries, r.stream = first, nil, l.baseStream
	for first < behind {
		middle := first + (behind-first)/2
		at, s, err := l.change(middle)
		if err != nil {
			return err
		}
		if at > r.off {
			behind = middle
			continue
		}
		first = middle + 1
		r.entry, r.stream = first, s
	}
	return nil
}

// position is a place in a log, with what a reader there has to know.
type position struct {
	off    int64
	stream Stream
	entry  int64
}

// before is the place so many bytes before the reader's, within what it has read last.
func (r *Reader) before(n int) position {
	return position{off: r.off - int64(n), stream: r.stream, entry: r.entry}
}

// from makes a second reader for what this one has read already. It is good as long as this one is open.
func (r *Reader) from(p position) *Reader {
	return &Reader{log: r.log, off: p.off, stream: p.stream, entry: p.entry}
}

// repeatable is how much may be left to be read again later. With it a reader that is waited for (see courtesy) stays
// well within what the spool keeps.
func (r *Reader) repeatable() int64 { return r.log.spool.commandMax / 8 }

// Ready gets a value when there may be more to read. One reader waits on it.
func (r *Reader) Ready() <-chan struct{} { return r.ready }

// Read gives what is there now, of one stream: n 0 means nothing yet, and done that nothing will come. lost is the
// number of bytes that were dropped before they could be read; the reading goes on behind them.
func (r *Reader) Read(buf []byte) (n int, s Stream, lost int64, done bool, err error) {
	l := r.log
	for {
		l.mu.Lock()
		if r.off < l.base {
			lost += l.base - r.off
			r.off = l.base
		}
		file, limit := l.file, l.end
		if l.finished {
			if !r.beyond {
				limit = l.finishedAt
			}
			done = r.off >= limit
		}
		if r.off >= limit {
			l.mu.Unlock()
			return 0, r.stream, lost, done, nil
		}
		limit, err = r.withinStream(limit)
		if err == nil && r.filter && r.stream != r.wanted {
			r.off = limit
			l.mu.Unlock()
			continue
		}
		l.mu.Unlock()
		if err != nil {
			return 0, 0, lost, false, err
		}
		limit = min(limit, r.off+int64(len(buf)))
		n, err = file.ReadAt(buf[:limit-r.off], r.off)
		if int64(n) == limit-r.off {
			err = nil
		}
		if err != nil {
			return 0, 0, lost, false, err
		}
		// The beginning may have been dropped while we read it: then this is a hole, not output.
		l.mu.Lock()
		overtaken := r.off < l.base
		if !overtaken {
			r.off += int64(n)
			l.advanced()
		}
		l.mu.Unlock()
		if overtaken {
			continue
		}
		return n, r.stream, lost, false, nil
	}
}

// withinStream brings r.stream up to r.off and cuts limit where the stream changes. Called with the log locked,
// because entries that are dropped read as zero.
func (r *Reader) withinStream(limit int64) (int64, error) {
	l := r.log
	if r.entry < l.firstEntry {
		r.entry, r.entries, r.stream = l.firstEntry, nil, l.baseStream
	}
	for r.entry < l.switches {
		if len(r.entries) == 0 {
			buf := make([]byte, 8*min(l.switches-r.entry, 512))
			if _, err := l.idx.ReadAt(buf, r.entry*8); err != nil {
				return 0, err
			}
			r.entries = buf
		}
		v := binary.LittleEndian.Uint64(r.entries)
		if at := int64(v >> 1); at > r.off {
			return min(limit, at), nil
		}
		r.stream = Stream(v & 1)
		r.entries = r.entries[8:]
		r.entry++
	}
	return limit, nil
}
