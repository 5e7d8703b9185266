// SPDX-License-Identifier: Apache-2.0

package command

import (
	"os"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// pipe moves what a process writes to its log. It sleeps in the runtime's poller, without a thread and without a
// buffer, while nothing comes.
type pipe struct {
	file   *os.File
	raw    syscall.RawConn
	stream Stream
	mu     sync.Mutex // from a read until its bytes are in the log
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
	return &pipe{file: file, raw: raw, stream: s}, w, nil
}

// copy runs until the last writer has closed the pipe, which can be long after the command's end.
func (p *pipe) copy(log *Log) {
	defer log.writerGone()
	defer p.file.Close()
	for ended := false; !ended; {
		err := p.raw.Read(func(fd uintptr) bool {
			n, err := p.move(int(fd), log)
			ended = n == 0 && err != unix.EAGAIN
			return err != unix.EAGAIN
		})
		if err != nil {
			return
		}
	}
}

// move stores one bufferful, if there is something.
func (p *pipe) move(fd int, log *Log) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	buf := buffers.Get().(*[chunk]byte)
	defer buffers.Put(buf)
	n, err := read(fd, buf[:])
	if n > 0 {
		log.append(p.stream, buf[:n])
		return n, nil
	}
	return 0, err
}

// drain stores what is in the pipe now; the process has ended before. One that was left behind and goes on writing could
// keep us here, so not more than fits into a pipe: everything older is in that, or copy has read it and is storing it,
// which move waits for; copy closes the pipe only after that. Whoever waits for the end does this, and not the goroutine
// that copies: it would have to be woken first.
func (p *pipe) drain(log *Log) {
	_ = p.raw.Control(func(fd uintptr) {
		capacity, err := unix.FcntlInt(fd, unix.F_GETPIPE_SZ, 0)
		if err != nil {
			capacity = chunk
		}
		for moved := 0; moved < capacity; {
			n, err := p.move(int(fd), log)
			if n == 0 || err != nil {
				return
			}
			moved += n
		}
	})
}

func read(fd int, buf []byte) (int, error) {
	for {
		n, err := unix.Read(fd, buf)
		if err != unix.EINTR {
			return n, err
		}
	}
}
