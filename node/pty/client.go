// SPDX-License-Identifier: Apache-2.0

package pty

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"net/http"
	"os"
	"time"

	"github.com/coder/websocket"
	"golang.org/x/sys/unix"

	"opensandbox.io/node/command"
	"opensandbox.io/node/wire"
)

// Kinds of binary frames.
const (
	frameInput  = 0x00
	frameStdout = 0x01
	frameStderr = 0x02
	frameReplay = 0x03 // and eight bytes of offset, big endian
)

const (
	closeTakenOver = 4001
	frameMax       = 64 << 10
	messageMax     = 1 << 20
	writeTime      = 10 * time.Second
	pingEvery      = 30 * time.Second // and a pong within the same time: 60 s in all
	inputStep      = 100 * time.Millisecond
)

// notice is a text frame from us; which fields it has depends on its type.
type notice struct {
	Type      string       `json:"type"`
	SessionID string       `json:"session_id,omitempty"`
	Mode      wire.PtyMode `json:"mode,omitempty"`
	ExitCode  *int         `json:"exit_code,omitempty"`
	Signal    string       `json:"signal,omitempty"` // that ended the program
	Code      string       `json:"code,omitempty"`
	Error     string       `json:"error,omitempty"`
}

// wish is a text frame from a client.
type wish struct {
	Type   string `json:"type"`
	Data   string `json:"data"`
	Cols   int    `json:"cols"`
	Rows   int    `json:"rows"`
	Signal string `json:"signal"`
}

// client is one connection.
type client struct {
	*terminal
	guest *guest
	conn  *websocket.Conn
}

// serve talks to a client until one of the two has had enough.
func (t *terminal) serve(w http.ResponseWriter, req *http.Request, g *guest, since int64) {
	// Who holds the token may call from anywhere; a browser cannot be made to send it.
	conn, err := websocket.Accept(w, req, &websocket.AcceptOptions{InsecureSkipVerify: true})
	if err != nil {
		return // it has answered
	}
	defer conn.CloseNow()
	conn.SetReadLimit(messageMax)
	c := &client{terminal: t, guest: g, conn: conn}
	ctx, cancel := context.WithCancel(context.Background())
	reader := make(chan struct{})
	go func() {
		defer close(reader)
		defer cancel()
		c.listen(ctx)
	}()
	pinger := make(chan struct{})
	go func() {
		defer close(pinger)
		defer cancel()
		c.ping(ctx)
	}()
	code, reason := c.show(ctx, since)
	if code != 0 {
		t.vacate(g)                  // who has read that it is over may connect again at once
		_ = conn.Close(code, reason) // waits for the client's answer, a few seconds
	}
	cancel()
	_ = conn.CloseNow()
	<-reader
	<-pinger
}

// show sends output from an offset on, and the end. The code is the one to close with; 0: the connection is broken.
func (c *client) show(ctx context.Context, at int64) (websocket.StatusCode, string) {
	t := c.terminal
	buf := make([]byte, 9+frameMax)
	t.mu.Lock()
	// What is there now is replay, the rest follows: nothing is between the two.
	at = min(max(at, 0), t.output.end)
	replayTo, mode := t.output.end, wire.PtyModePty
	if t.run != nil {
		mode = t.run.mode
	}
	t.mu.Unlock()
	greeted := false
	for {
		if !greeted && at >= replayTo {
			greeted = true
			if c.say(ctx, notice{Type: "connected", SessionID: t.id, Mode: mode}) != nil {
				return 0, ""
			}
		}
		t.mu.Lock()
		frame := buf[:0]
		if base := t.output.base(); at < base || !greeted {
			// The beginning, or what came meanwhile has been overwritten: the client sees from the offset what it missed.
			at = max(at, base)
			binary.BigEndian.PutUint64(buf[1:], uint64(at))
			n := t.output.replay(at, buf[9:])
			buf[0], frame = frameReplay, buf[:9+n]
			at += int64(n)
		} else if at < t.output.end {
			n, s := t.output.read(at, buf[1:1+frameMax])
			buf[0], frame = frameStdout, buf[:1+n]
			if s == command.Stderr {
				buf[0] = frameStderr
			}
			at += int64(n)
		}
		changed, code, signal := t.changed, t.code, t.signal
		over := t.run != nil && !t.running || t.deleted && !t.running
		t.mu.Unlock()
		if len(frame) > 0 {
			if c.send(ctx, websocket.MessageBinary, frame) != nil {
				return 0, ""
			}
			select {
			case <-c.guest.evicted:
				return closeTakenOver, "TAKEN_OVER"
			default:
			}
			continue
		}
		if over {
			if t.run != nil {
				if c.say(ctx, notice{Type: "exit", ExitCode: &code, Signal: signal}) != nil {
					return 0, ""
				}
				t.mu.Lock()
				t.told = t.told || !c.guest.viewer
				t.mu.Unlock()
			}
			return websocket.StatusNormalClosure, ""
		}
		select {
		case <-changed:
		case <-c.guest.evicted:
			return closeTakenOver, "TAKEN_OVER"
		case <-ctx.Done():
			return 0, ""
		}
	}
}

func (c *client) send(ctx context.Context, kind websocket.MessageType, data []byte) error {
	ctx, cancel := context.WithTimeout(ctx, writeTime)
	defer cancel()
	return c.conn.Write(ctx, kind, data)
}

func (c *client) say(ctx context.Context, n notice) error {
	data, err := json.Marshal(n)
	if err != nil {
		panic(err) // plain fields
	}
	return c.send(ctx, websocket.MessageText, data)
}

// ping finds out about a client that is gone without a word.
func (c *client) ping(ctx context.Context) {
	ticker := time.NewTicker(pingEvery)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		limited, cancel := context.WithTimeout(ctx, pingEvery)
		err := c.conn.Ping(limited)
		cancel()
		if err != nil {
			return
		}
	}
}

// listen does what the client asks for.
func (c *client) listen(ctx context.Context) {
	for {
		kind, data, err := c.conn.Read(ctx)
		if err != nil {
			return
		}
		if err := c.obey(ctx, kind, data); err != nil {
			var f *fault
			if !errors.As(err, &f) {
				f = &fault{"RUNTIME_ERROR", err.Error()}
			}
			if c.say(ctx, notice{Type: "error", Code: f.code, Error: f.text}) != nil {
				return
			}
		}
	}
}

// fault is an error that a client is told.
type fault struct{ code, text string }

func (f *fault) Error() string { return f.text }

var signals = map[string]unix.Signal{
	"SIGINT": unix.SIGINT, "SIGTERM": unix.SIGTERM, "SIGKILL": unix.SIGKILL, "SIGQUIT": unix.SIGQUIT, "SIGHUP": unix.SIGHUP,
}

func (c *client) obey(ctx context.Context, kind websocket.MessageType, data []byte) error {
	if kind == websocket.MessageBinary {
		if len(data) == 0 || data[0] != frameInput {
			return &fault{"INVALID_FRAME", "A binary frame begins with 0x00 and carries input."}
		}
		return c.input(ctx, data[1:])
	}
	var w wish
	if err := json.Unmarshal(data, &w); err != nil {
		return &fault{"INVALID_FRAME", "A text frame is a JSON object with a type."}
	}
	switch w.Type {
	case "ping":
		return c.say(ctx, notice{Type: "pong"})
	case "stdin":
		return c.input(ctx, []byte(w.Data))
	case "resize":
		run, err := c.program()
		if err != nil {
			return err
		}
		if w.Cols < 1 || w.Cols > 65535 || w.Rows < 1 || w.Rows > 65535 {
			return &fault{"INVALID_FRAME", "cols and rows are between 1 and 65535."}
		}
		if run.mode != wire.PtyModePty {
			return &fault{"NOT_SUPPORTED", "Pipes have no size."}
		}
		return run.control(func(fd int) error { return resize(fd, w.Cols, w.Rows) })
	case "signal":
		run, err := c.program()
		if err != nil {
			return err
		}
		sig, ok := signals[w.Signal]
		if !ok {
			return &fault{"INVALID_FRAME", "signal is one of SIGINT, SIGTERM, SIGKILL, SIGQUIT and SIGHUP."}
		}
		return run.signal(sig)
	}
	return &fault{"INVALID_FRAME", "type is one of stdin, resize, signal and ping."}
}

// program gives the one that a client may touch.
func (c *client) program() (*program, error) {
	if c.guest.viewer {
		return nil, &fault{"READ_ONLY", "A viewer can only look."}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.holder != c.guest:
		return nil, &fault{"TAKEN_OVER", "Another client has taken this terminal."}
	case !c.running:
		return nil, &fault{"NOT_RUNNING", "The program has ended."}
	}
	return c.run, nil
}

// input goes to the program as fast as it reads; a client that sends more waits, until it is gone.
func (c *client) input(ctx context.Context, data []byte) error {
	run, err := c.program()
	if err != nil {
		return err
	}
	for len(data) > 0 {
		_ = run.input.SetWriteDeadline(time.Now().Add(inputStep))
		n, err := run.input.Write(data)
		data = data[n:]
		if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
			return &fault{"NOT_RUNNING", "The program does not take input any more."}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-c.guest.evicted:
			return nil
		default:
		}
	}
	return nil
}
