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
	var entry [8]byte
	for l.idx != nil && l.firstEntry < l.switches {
		if _, err := l.idx.ReadAt(entry[:], l.firstEntry*8); err != nil {
			break
		}
		v := binary.LittleEndian.Uint64(entry[:])
		if int64(v>>1) > to {
			break
		}
		l.baseStream = Stream(v & 1)
		l.firstEntry++
	}
	err := errors.Join(punch(l.idx, l.firstEntry*8), punch(l.file, to))
	l.base = to
	l.spool.used.Add(l.sizeLocked() - before)
	return err
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
		l.base, l.firstEntry, l.baseStream = l.end, l.switches, l.stream
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

// recall takes over the files of an earlier run of the daemon.
func (l *Log) recall() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.finished = true
	f, err := l.spool.open(l.name+".log", unix.O_RDONLY)
	if err != nil {
		return
	}
	defer f.Close()
	if l.end, err = f.Seek(0, io.SeekEnd); err != nil {
		return
	}
	l.finishedAt = l.end
	if data, err := f.Seek(0, unix.SEEK_DATA); err == nil {
		l.base = data // before it is the hole of what was dropped
	}
	if idx, err := l.spool.open(l.name+".idx", unix.O_RDONLY); err == nil {
		size, _ := idx.Seek(0, io.SeekEnd)
		l.switches = size / 8
		_ = idx.Close()
	}
	l.spool.used.Add(l.sizeLocked())
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
	return r, nil
}

// Close ends the reading.
func (r *Reader) Close() {
	l := r.log
	l.mu.Lock()
	defer l.mu.Unlock()
	if i := slices.Index(l.readers, r); i >= 0 {
		l.readers = slices.Delete(l.readers, i, i+1)
		l.refs--
		l.advanced()
		l.release()
	}
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
		limit, err = r.withinStream(min(limit, r.off+int64(len(buf))))
		l.mu.Unlock()
		if err != nil {
			return 0, 0, lost, false, err
		}
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
