// SPDX-License-Identifier: Apache-2.0

package command

import (
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// Pump moves what comes out of a pipe or a terminal. The file must be non-blocking.
type Pump struct {
	File   *os.File
	Stream Stream
	Sink   func(Stream, []byte)

	mu  sync.Mutex // from a read until its bytes are in the sink
	buf [32 << 10]byte
}

// Run works until the last writer has closed the pipe, or it is closed on our side.
func (p *Pump) Run() {
	raw, err := p.File.SyscallConn()
	if err != nil {
		return
	}
	for ended := false; !ended; {
		err := raw.Read(func(fd uintptr) bool {
			n, err := p.move(int(fd))
			ended = n == 0 && err == nil || err != nil && err != unix.EAGAIN
			return err != unix.EAGAIN
		})
		if err != nil {
			return
		}
	}
}

func (p *Pump) move(fd int) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for {
		n, err := unix.Read(fd, p.buf[:])
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return 0, err
		}
		if n > 0 {
			p.Sink(p.Stream, p.buf[:n])
		}
		return n, nil
	}
}

// Drain moves what is in the pipe now. One that goes on writing could keep us here, so not more than fits into it:
// everything older is in that.
func (p *Pump) Drain() {
	raw, err := p.File.SyscallConn()
	if err != nil {
		return
	}
	_ = raw.Control(func(fd uintptr) {
		capacity, err := unix.FcntlInt(fd, unix.F_GETPIPE_SZ, 0)
		if err != nil {
			capacity = 1 << 20 // a terminal
		}
		for moved := 0; moved < capacity; {
			n, err := p.move(int(fd))
			if n == 0 || err != nil {
				return
			}
			moved += n
		}
	})
}

// Settle waits until what has been read is in the sink.
func (p *Pump) Settle() {
	p.mu.Lock()
	defer p.mu.Unlock()
}

// NewPipe makes a pipe of which we keep the reading or the writing end. Only ours is non-blocking: programs expect to
// wait.
func NewPipe(reading bool) (ours, theirs *os.File, err error) {
	var fds [2]int
	if err := unix.Pipe2(fds[:], unix.O_CLOEXEC); err != nil {
		return nil, nil, err
	}
	keep, give := fds[1], fds[0]
	if reading {
		keep, give = fds[0], fds[1]
	}
	if err := unix.SetNonblock(keep, true); err != nil {
		_ = unix.Close(keep)
		_ = unix.Close(give)
		return nil, nil, err
	}
	return os.NewFile(uintptr(keep), "pipe"), os.NewFile(uintptr(give), "pipe"), nil
}
