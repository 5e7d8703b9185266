// SPDX-License-Identifier: Apache-2.0

// Package portproxy serves the `ports` socket, through which the host reaches servers inside a sandbox that has no
// address of its own. A client sends `CONNECT <port>\n`; the proxy dials 127.0.0.1 and then ::1 from inside and
// answers `OK\n`, after which bytes go both ways, or `ERR <CODE> <message>\n`.
package portproxy

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"strconv"
	"strings"
	"sync"
	"time"

	"opensandbox.io/node/wire"
)

const (
	lineMax     = 32 // CONNECT 65535\n with room to spare
	lineTimeout = 10 * time.Second
	dialTimeout = 5 * time.Second
)

// Proxy serves connections.
type Proxy struct {
	// Refused are ports that are never dialled: execd's own.
	Refused []int
	Log     *slog.Logger

	mu     sync.Mutex
	closed bool
	conns  map[net.Conn]struct{}
	served sync.WaitGroup
}

// Serve accepts until the listener is closed.
func (p *Proxy) Serve(l net.Listener) error {
	for {
		conn, err := l.Accept()
		if err != nil {
			if errors.Is(err, net.ErrClosed) {
				return nil
			}
			var temporary interface{ Temporary() bool }
			if errors.As(err, &temporary) && temporary.Temporary() {
				// Out of descriptors: a closed connection frees one, and nobody is helped by a busy loop.
				time.Sleep(20 * time.Millisecond)
				continue
			}
			return err
		}
		if !p.track(conn) {
			return nil
		}
		go func() {
			defer p.served.Done()
			defer p.untrack(conn)
			p.serve(conn)
		}()
	}
}

// Close ends all connections and waits for their goroutines. Close the listener first.
func (p *Proxy) Close() {
	p.mu.Lock()
	p.closed = true
	for c := range p.conns {
		_ = c.Close()
	}
	p.mu.Unlock()
	p.served.Wait()
}

func (p *Proxy) track(c net.Conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		_ = c.Close()
		return false
	}
	if p.conns == nil {
		p.conns = map[net.Conn]struct{}{}
	}
	p.conns[c] = struct{}{}
	p.served.Add(1)
	return true
}

func (p *Proxy) untrack(c net.Conn) {
	p.mu.Lock()
	delete(p.conns, c)
	p.mu.Unlock()
	_ = c.Close()
}

func (p *Proxy) serve(client net.Conn) {
	port, early, err := readLine(client)
	if err != nil {
		fail(client, wire.CodeIngressBadRoute, err)
		return
	}
	for _, own := range p.Refused {
		if port == own {
			fail(client, wire.CodeIngressBadRoute, fmt.Errorf("port %d belongs to the sandbox's daemon", port))
			return
		}
	}
	server, err := Dial(context.Background(), port)
	if err != nil {
		fail(client, wire.CodeIngressPortClosed, fmt.Errorf("nothing answers on port %d", port))
		return
	}
	defer server.Close()
	if !p.trackPeer(server) {
		return
	}
	defer p.untrackPeer(server)
	if _, err := io.WriteString(client, "OK\n"); err != nil {
		return
	}
	if _, err := server.Write(early); err != nil {
		return
	}
	join(client, server)
}

func (p *Proxy) trackPeer(c net.Conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return false
	}
	p.conns[c] = struct{}{}
	return true
}

func (p *Proxy) untrackPeer(c net.Conn) {
	p.mu.Lock()
	delete(p.conns, c)
	p.mu.Unlock()
}

// readLine reads the request. Bytes behind it are the client's first, for those who do not wait for OK.
func readLine(client net.Conn) (port int, early []byte, err error) {
	_ = client.SetReadDeadline(time.Now().Add(lineTimeout))
	defer func() { _ = client.SetReadDeadline(time.Time{}) }()
	buf := make([]byte, 0, 512)
	for {
		n, err := client.Read(buf[len(buf):cap(buf)])
		buf = buf[:len(buf)+n]
		if line, rest, ok := strings.Cut(string(buf), "\n"); ok {
			port, err := parse(line)
			return port, []byte(rest), err
		}
		if err != nil {
			return 0, nil, errors.New("the request line is not complete")
		}
		if len(buf) >= lineMax {
			return 0, nil, errors.New("the request line is too long")
		}
	}
}

func parse(line string) (int, error) {
	text, ok := strings.CutPrefix(line, "CONNECT ")
	if !ok {
		return 0, errors.New("the request is not CONNECT <port>")
	}
	port, ok := ParsePort(text)
	if !ok {
		return 0, errors.New("the port is not a number from 1 to 65535")
	}
	return port, nil
}

// ParsePort reads a port from 1 to 65535 in its one canonical form: no sign, no leading zero, no space.
func ParsePort(text string) (port int, ok bool) {
	n, err := strconv.ParseUint(text, 10, 16)
	return int(n), err == nil && n > 0 && text[0] != '0' && text[0] != '+'
}

// Dial connects to a port of this network namespace's loopback: 127.0.0.1, then ::1, and nothing else.
func Dial(ctx context.Context, port int) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	var d net.Dialer
	text := strconv.Itoa(port)
	conn, err := d.DialContext(ctx, "tcp", "127.0.0.1:"+text)
	if err != nil {
		conn, err = d.DialContext(ctx, "tcp", "[::1]:"+text)
	}
	return conn, err
}

func fail(client net.Conn, code wire.Code, err error) {
	_ = client.SetWriteDeadline(time.Now().Add(lineTimeout))
	_, _ = fmt.Fprintf(client, "ERR %s %s\n", code, err)
}

// join copies both ways. When one side has said all, the other is told so and may go on: half-closed connections are
// normal in HTTP and needed by netcat.
func join(a, b net.Conn) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		copyHalf(a, b)
	}()
	copyHalf(b, a)
	<-done
}

func copyHalf(to, from net.Conn) {
	_, err := io.Copy(to, from)
	if err != nil {
		// One direction is broken: neither can be trusted to end by itself.
		_ = to.Close()
		_ = from.Close()
		return
	}
	if half, ok := to.(interface{ CloseWrite() error }); ok {
		_ = half.CloseWrite()
		return
	}
	_ = to.Close()
}
