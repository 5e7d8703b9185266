// SPDX-License-Identifier: Apache-2.0

package command

import (
	"errors"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// pipe moves what a process writes to its log. It sleeps in the runtime's poller, without a thread and without a
// buffer, while nothing comes.
type pipe struct {
	file    *os.File
	raw     syscall.RawConn
	stream  Stream
	drained chan struct{} // closed when everything written before drain has been moved
}

var buffers = sync.Pool{New: func() any { return new([chunk]byte) }}

// newPipe gives the reading side and the file for the process.
func newPipe(s Stream) (*pipe, *os.File, error) {
	var fds [2]int
	if err := unix.Pipe2(fds[:], unix.O_CLOEXEC); err != nil {
		return nil, nil, err
	}
	// Only our side: the program expects writes that wait.
	if err := unix.SetNonblock(fds[0], true); err != nil {
		_ = unix.Close(fds[0])
		_ = unix.Close(fds[1])
		return nil, nil, err
	}
	file, w := os.NewFile(uintptr(fds[0]), "pipe"), os.NewFile(uintptr(fds[1]), "pipe")
	raw, err := file.SyscallConn()
	if err != nil {
		_ = file.Close()
		_ = w.Close()
		return nil, nil, err
	}
	return &pipe{file: file, raw: raw, stream: s, drained: make(chan struct{})}, w, nil
}

// drain asks copy to move what is in the pipe and then to close drained. The process has ended before.
func (p *pipe) drain() { _ = p.file.SetReadDeadline(time.Unix(1, 0)) }

// copy runs until the last writer has closed the pipe, which can be long after the command's end.
func (p *pipe) copy(log *Log) {
	defer log.writerGone()
	defer p.file.Close()
	draining := false
	defer func() {
		if !draining {
			close(p.drained)
		}
	}()
	for {
		more, err := p.move(log)
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded) && !draining:
			draining = true
			more = p.empty(log)
			_ = p.file.SetReadDeadline(time.Time{})
			close(p.drained)
		case err != nil:
			return
		}
		if !more {
			return
		}
	}
}

// move waits for output and stores one bufferful; more is false at the end.
func (p *pipe) move(log *Log) (more bool, err error) {
	var n int
	var failed error
	var buf *[chunk]byte
	err = p.raw.Read(func(fd uintptr) bool {
		buf = buffers.Get().(*[chunk]byte)
		n, failed = read(int(fd), buf[:])
		if failed == unix.EAGAIN {
			buffers.Put(buf)
			buf = nil
			return false
		}
		return true
	})
	if buf != nil {
		defer buffers.Put(buf)
	}
	if err != nil {
		return true, err
	}
	if failed != nil || n == 0 {
		return false, nil
	}
	log.append(p.stream, buf[:n])
	return true, nil
}

// empty stores what is in the pipe now. One that goes on writing could keep us here, so not more than fits into a
// pipe: everything older is in that.
func (p *pipe) empty(log *Log) (more bool) {
	more = true
	buf := buffers.Get().(*[chunk]byte)
	defer buffers.Put(buf)
	_ = p.raw.Control(func(fd uintptr) {
		capacity, err := unix.FcntlInt(fd, unix.F_GETPIPE_SZ, 0)
		if err != nil {
			capacity = chunk
		}
		for moved := 0; moved < capacity; {
			n, err := read(int(fd), buf[:])
			if err == unix.EAGAIN {
				return
			}
			if err != nil || n == 0 {
				more = false
				return
			}
			log.append(p.stream, buf[:n])
			moved += n
		}
	})
	return more
}

func read(fd int, buf []byte) (int, error) {
	for {
		n, err := unix.Read(fd, buf)
		if err != unix.EINTR {
			return n, err
		}
	}
}
