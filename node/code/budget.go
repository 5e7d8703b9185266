// SPDX-License-Identifier: Apache-2.0

package code

import (
	"bufio"
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"time"
)

const (
	lineMax     = 8 << 20
	budgetTotal = 2 * lineMax
	smallLine   = 64 << 10         // needs no reservation while it is read
	lineTime    = 10 * time.Second // for a long line to come whole, and for room to take it
)

// budget bounds what lines of all kernels together take of the daemon's memory: a long one from before it is read, a
// short one from when it is known to be something that waits, both until their event is sent.
type budget struct {
	mu    sync.Mutex
	used  int64
	freed chan struct{} // closed when something was given back; nil while nobody waits
}

// reserve takes bytes, waiting for them until the deadline or until stop is closed.
func (b *budget) reserve(n int64, deadline time.Time, stop <-chan struct{}) bool {
	for {
		b.mu.Lock()
		if b.used+n <= budgetTotal {
			b.used += n
			b.mu.Unlock()
			return true
		}
		if b.freed == nil {
			b.freed = make(chan struct{})
		}
		freed := b.freed
		b.mu.Unlock()
		timer := time.NewTimer(time.Until(deadline))
		select {
		case <-freed:
			timer.Stop()
		case <-timer.C:
			return false
		case <-stop:
			timer.Stop()
			return false
		}
	}
}

// release gives bytes back.
func (b *budget) release(n int64) {
	if n == 0 {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.used -= n
	if b.freed != nil {
		close(b.freed)
		b.freed = nil
	}
}

// lineReader reads the lines of a kernel.
type lineReader struct {
	conn   net.Conn
	in     *bufio.Reader
	budget *budget
	stop   <-chan struct{} // closed when nobody wants lines any more
}

// errDropped says that a line was too long, or came too slowly, and is not there.
var errDropped = errors.New("line dropped")

// next gives the next line and how much of the budget it holds. After errDropped there may be more lines.
func (r *lineReader) next() (line []byte, held int64, err error) {
	for {
		part, err := r.in.ReadSlice('\n')
		line = append(line, part...)
		switch {
		case err == nil && len(line) <= lineMax:
			if held > 0 {
				_ = r.conn.SetReadDeadline(time.Time{})
				r.budget.release(held - int64(len(line)))
				held = int64(len(line))
			}
			return line, held, nil
		case errors.Is(err, bufio.ErrBufferFull) && len(line) <= lineMax:
			if held > 0 || len(line) <= smallLine {
				continue
			}
			deadline := time.Now().Add(lineTime)
			if r.budget.reserve(lineMax, deadline, r.stop) {
				held = lineMax
				_ = r.conn.SetReadDeadline(deadline)
				continue
			}
		case err != nil && !errors.Is(err, bufio.ErrBufferFull) && !errors.Is(err, os.ErrDeadlineExceeded):
			r.budget.release(held)
			return nil, 0, err
		}
		r.budget.release(held)
		_ = r.conn.SetReadDeadline(time.Time{})
		if err == nil {
			return nil, 0, errDropped
		}
		return nil, 0, r.skip()
	}
}

// skip reads to the end of a line that nobody wants.
func (r *lineReader) skip() error {
	for {
		_, err := r.in.ReadSlice('\n')
		switch {
		case err == nil:
			return errDropped
		case !errors.Is(err, bufio.ErrBufferFull):
			if errors.Is(err, io.EOF) {
				return io.EOF
			}
			return err
		}
	}
}
