// SPDX-License-Identifier: Apache-2.0

package code

import (
	"bufio"
	"fmt"
	"net"
	"path"
	"slices"
	"strings"
	"sync"
	"time"
)

const (
	probeAddress = "127.0.0.1:44771"
	probesMax    = 8 // at once: everybody in the sandbox may connect
	probeTime    = 2 * time.Second
	probeBytes   = 4 << 10
)

// Entry points of the published code interpreter images.
var entryPoints = []string{"/opt/opensandbox/code-interpreter.sh", "/opt/code-interpreter/code-interpreter.sh"}

// IsEntrypoint tells whether a sandbox is started to run code.
func IsEntrypoint(argv []string) bool {
	return slices.ContainsFunc(argv[:min(len(argv), 2)], func(word string) bool { return slices.Contains(entryPoints, path.Clean(word)) })
}

// Warm gets ready what a sandbox for code needs, in the background: the interpreter that contexts are forked from, and
// somebody on the port at which published clients look for a notebook server before they run the first cell.
func (a *API) Warm() {
	go func() {
		a.listen()
		if _, err := a.python.warm(a); err != nil {
			a.Log.Warn("starting Python ahead of the first cell", "error", err)
		}
	}()
}

// listen takes the port, unless somebody has it: a real notebook server is as good.
func (a *API) listen() {
	listener, err := net.Listen("tcp4", probeAddress)
	if err != nil {
		a.Log.Info("the port of the notebook server is taken", "error", err)
		return
	}
	p := &probe{listener: listener, slots: make(chan struct{}, probesMax), conns: map[net.Conn]bool{}}
	a.mu.Lock()
	closed := a.closed
	if !closed {
		a.probe = p
	}
	a.mu.Unlock()
	p.running.Go(p.serve)
	if closed {
		p.close()
	}
}

// probe answers on the port of the notebook server that is not there. Whoever connects is hostile: few at once, a short
// time, a little to read.
type probe struct {
	listener net.Listener
	slots    chan struct{}
	running  sync.WaitGroup

	mu     sync.Mutex
	conns  map[net.Conn]bool
	closed bool
}

func (p *probe) serve() {
	for {
		p.slots <- struct{}{}
		conn, err := p.listener.Accept()
		if err != nil {
			return
		}
		p.mu.Lock()
		p.conns[conn] = true
		closed := p.closed
		p.mu.Unlock()
		if closed {
			_ = conn.Close()
		}
		p.running.Go(func() {
			answer(conn)
			p.mu.Lock()
			delete(p.conns, conn)
			p.mu.Unlock()
			_ = conn.Close()
			<-p.slots
		})
	}
}

func (p *probe) close() {
	_ = p.listener.Close()
	p.mu.Lock()
	p.closed = true
	for conn := range p.conns {
		_ = conn.Close()
	}
	p.mu.Unlock()
	p.running.Wait()
}

const probeText = `{"status":"ok","message":"Code runs without a notebook server here: use the /code routes of execd."}`

// answer reads the head of a request and says what is here, whatever was asked for.
func answer(conn net.Conn) {
	_ = conn.SetDeadline(time.Now().Add(probeTime))
	in := bufio.NewReaderSize(conn, 512)
	for read := 0; read < probeBytes; {
		line, err := in.ReadSlice('\n')
		read += len(line)
		if err != nil && err != bufio.ErrBufferFull {
			return
		}
		if err == nil && strings.TrimRight(string(line), "\r\n") == "" {
			_, _ = fmt.Fprintf(conn, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s", len(probeText), probeText)
			return
		}
	}
}
