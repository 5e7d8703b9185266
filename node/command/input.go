// SPDX-License-Identifier: Apache-2.0

package command

import (
	"errors"
	"io"
	"net/http"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"opensandbox.io/node/reply"
	"opensandbox.io/node/wire"
)

// input is our end of the pipe that a command reads as its standard input.
type input struct {
	file *os.File      // non-blocking: a writer waits in the runtime's poller, and closing wakes it
	turn chan struct{} // holds a value while somebody writes, so that bodies do not mix

	mu     sync.Mutex
	closed string // why nothing more can be written; empty: it can
}

// newInput gives our end and the file for the process.
func newInput() (*input, *os.File, error) {
	ours, theirs, err := NewPipe(false)
	if err != nil {
		return nil, nil, err
	}
	return &input{file: ours, turn: make(chan struct{}, 1)}, theirs, nil
}

// close ends the program's input. The first reason counts.
func (in *input) close(why string) {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.closed == "" {
		in.closed = why
		_ = in.file.Close()
	}
}

func (in *input) reason() string {
	in.mu.Lock()
	defer in.mu.Unlock()
	return in.closed
}

// open is true when somebody could write and somebody could read it.
func (in *input) open() bool {
	if in == nil || in.reason() != "" {
		return false
	}
	raw, err := in.file.SyscallConn()
	if err != nil {
		return false
	}
	read := false
	err = raw.Control(func(fd uintptr) {
		// The kernel reports an error on a pipe without readers.
		fds := []unix.PollFd{{Fd: int32(fd)}}
		_, err := unix.Poll(fds, 0)
		read = err == nil && fds[0].Revents&unix.POLLERR == 0
	})
	return err == nil && read
}

const (
	closedByRequest = "an earlier request has closed it"
	closedByProgram = "the program has closed it"
	closedByEnd     = "the command has ended"
)

var errInputClosed = errors.New("closed")

// write moves a body to the program, at the program's pace. What was read of the body is written before its error is
// given back, so an error of the body's means that the client is gone and the input still open.
func (in *input) write(body io.Reader) (written int64, err error) {
	buf := buffers.Get().(*[chunk]byte)
	defer buffers.Put(buf)
	for {
		n, failed := body.Read(buf[:])
		if n > 0 {
			m, err := in.file.Write(buf[:n])
			written += int64(m)
			if errors.Is(err, unix.EPIPE) {
				in.close(closedByProgram)
			}
			if err != nil {
				return written, errInputClosed
			}
		}
		if failed == io.EOF {
			return written, nil
		}
		if failed != nil {
			return written, failed
		}
	}
}

// serveInput writes the request's body to the input of a command.
func (r *Runner) serveInput(w http.ResponseWriter, req *http.Request, id string) {
	last, err := flag(req, "close")
	if err != nil {
		reply.Error(w, req, err)
		return
	}
	c, err := r.Find(id)
	if err != nil {
		reply.Error(w, req, err)
		return
	}
	in := c.stdin()
	if in == nil {
		reply.Error(w, req, reply.Errorf(wire.CodeStdinNotOpen, "Command %s has no open input.", id).
			WithHint("Start it with stdin: true; it cannot be opened later."))
		return
	}
	select {
	case in.turn <- struct{}{}:
		defer func() { <-in.turn }()
	case <-c.done:
	case <-req.Context().Done():
		return
	}
	if why := in.reason(); why != "" {
		reply.Error(w, req, inputFault(id, why, 0))
		return
	}
	written, err := in.write(req.Body)
	if err == nil && written == 0 && !last && !in.open() {
		in.close(closedByProgram) // an empty body asks
		err = errInputClosed
	}
	switch {
	case errors.Is(err, errInputClosed):
		reply.Error(w, req, inputFault(id, in.reason(), written))
	case err != nil:
		reply.Error(w, req, invalid("The body ended early, after %d bytes, which the program got: %v.", written, err).
			WithHint("Its input is still open; send the rest."))
	default:
		if last {
			in.close(closedByRequest)
		}
		reply.JSON(w, http.StatusOK, wire.StdinWritten{Bytes: written})
	}
}

func inputFault(id, why string, written int64) *reply.Fault {
	if why == "" {
		why = closedByProgram
	}
	hint := "Nothing more can be written to it."
	if why == closedByEnd {
		hint = "Ask for its status to see how."
	}
	return reply.Errorf(wire.CodeStdinNotOpen, "The input of command %s is not open: %s. Of this body its pipe took %d bytes.", id, why, written).
		WithHint("%s", hint)
}
