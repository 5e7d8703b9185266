// SPDX-License-Identifier: Apache-2.0

package command

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"strconv"
	"time"
	"unicode/utf8"

	"opensandbox.io/node/wire"
)

// Stream tells standard output and standard error apart.
type Stream uint8

// The streams of a command. One that runs in the background has only the first: both are merged as they come.
const (
	Stdout Stream = iota
	Stderr
)

func (s Stream) event() wire.ExecutionEventType {
	if s == Stderr {
		return wire.ExecutionEventTypeStderr
	}
	return wire.ExecutionEventTypeStdout
}

// chunk is the longest text of an event. A line that does not end is sent in pieces of this size, so that neither
// the daemon nor a client has to hold it.
const chunk = 64 << 10

// framer turns output into events. Contract (spec/execd.yaml, x-framing): a line is sent when it is complete and
// without its terminator, which goes in front of the next text of the same stream; the one left over at the end is
// dropped. \n, \r\n and \r end a line: progress bars come through as they are drawn.
//
// An exact framer knows no lines: what it is fed is one event at once, as bytes.
type framer struct {
	exact bool
	lines [2]line
	out   []byte // encoded events that wait to be written
	stamp []byte // the time of what is being fed, encoded; asking for it once per line costs more than the line
}

// line is what is known of a stream's current line.
type line struct {
	pending []byte // terminator of the last line, not yet sent
	text    []byte // the line so far
}

func newFramer(exact bool) *framer { return &framer{exact: exact} }

func (f *framer) tick() { f.stamp = strconv.AppendInt(f.stamp[:0], time.Now().UnixMilli(), 10) }

// feed takes output of one stream.
func (f *framer) feed(s Stream, data []byte) {
	f.tick()
	if f.exact {
		f.emitExact(s, data)
		return
	}
	l := &f.lines[s]
	// "\r" ended the last line; its "\n" arrives only now and belongs to the same terminator.
	if len(data) > 0 && data[0] == '\n' && len(l.text) == 0 && bytes.Equal(l.pending, []byte("\r")) {
		l.pending = append(l.pending, '\n')
		data = data[1:]
	}
	newline := -1 // position of the next \n, -1 unknown; kept so that many \r do not make many searches
	for len(data) > 0 {
		if newline < 0 {
			if newline = bytes.IndexByte(data, '\n'); newline < 0 {
				newline = len(data)
			}
		}
		end := newline
		if r := bytes.IndexByte(data[:newline], '\r'); r >= 0 {
			end = r
		}
		if end == len(data) {
			f.extend(s, data)
			return
		}
		f.extend(s, data[:end])
		width := 1
		if data[end] == '\r' && end+1 < len(data) && data[end+1] == '\n' {
			width = 2
		}
		f.emit(s, l.text)
		l.text = l.text[:0]
		l.pending = append(l.pending[:0], data[end:end+width]...)
		data = data[end+width:]
		newline -= end + width
	}
}

// extend adds to the current line and sends the full chunks of one that has grown too long.
func (f *framer) extend(s Stream, data []byte) {
	l := &f.lines[s]
	for len(l.text)+len(data) > chunk {
		n := chunk - len(l.text)
		l.text = append(l.text, data[:n]...)
		data = data[n:]
		keep := len(l.text) - partialRune(l.text)
		f.emit(s, l.text[:keep])
		l.text = append(l.text[:0], l.text[keep:]...)
	}
	l.text = append(l.text, data...)
}

// close sends the last lines, which had no end.
func (f *framer) close() {
	f.tick()
	for s := range f.lines {
		l := &f.lines[s]
		if len(l.text) > 0 {
			f.emit(Stream(s), l.text)
		}
		l.text, l.pending = nil, nil
	}
}

// emit encodes one event with the pending terminator in front. An empty text says nothing and is not sent.
func (f *framer) emit(s Stream, text []byte) {
	l := &f.lines[s]
	if len(l.pending) == 0 && len(text) == 0 {
		return
	}
	f.head(s.event())
	f.out = append(f.out, `,"text":"`...)
	f.out = appendText(f.out, l.pending)
	f.out = appendText(f.out, text)
	f.out = append(f.out, '"')
	f.tail()
	l.pending = l.pending[:0]
}

// emitExact encodes one event with the bytes as they are.
func (f *framer) emitExact(s Stream, data []byte) {
	if len(data) == 0 {
		return
	}
	f.head(s.event())
	f.out = append(f.out, `,"data":"`...)
	f.out = base64.StdEncoding.AppendEncode(f.out, data)
	f.out = append(f.out, '"')
	f.tail()
}

// event encodes an event with a plain text.
func (f *framer) event(kind wire.ExecutionEventType, text string) {
	f.tick()
	f.head(kind)
	f.out = append(f.out, `,"text":"`...)
	f.out = appendText(f.out, []byte(text))
	f.out = append(f.out, '"')
	f.tail()
}

// terminal encodes the one event that ends a stream.
func (f *framer) terminal(end *wire.CommandEnd, took time.Duration) {
	ms := took.Milliseconds()
	e := wire.ExecutionEvent{Timestamp: time.Now().UnixMilli(), End: end}
	if end == nil || end.Reason != wire.CommandEndReasonStartFailed && end.ExitCode != nil && *end.ExitCode == 0 {
		e.Type, e.ExecutionTime = wire.ExecutionEventTypeExecutionComplete, &ms
	} else {
		e.Type, e.Error = wire.ExecutionEventTypeError, executionError(end)
	}
	data, err := json.Marshal(e)
	if err != nil {
		panic(err) // plain strings and numbers: it cannot
	}
	f.out = append(append(f.out, data...), "\n\n"...)
}

// executionError puts an end into the published shape: published clients read the exit code from evalue.
func executionError(end *wire.CommandEnd) *wire.ExecutionError {
	e := &wire.ExecutionError{Ename: "CommandExecError", Evalue: "-1"}
	switch {
	case end.Reason == wire.CommandEndReasonStartFailed:
		e.Evalue = end.Message
	case end.ExitCode != nil:
		e.Evalue = strconv.Itoa(*end.ExitCode)
	}
	e.Traceback = []string{describe(end)}
	return e
}

func (f *framer) head(kind wire.ExecutionEventType) {
	f.out = append(f.out, `{"type":"`...)
	f.out = append(f.out, kind...)
	f.out = append(f.out, '"')
}

func (f *framer) tail() {
	f.out = append(f.out, `,"timestamp":`...)
	f.out = append(f.out, f.stamp...)
	f.out = append(f.out, "}\n\n"...)
}

// partialRune gives the number of bytes at the end of text that may be the beginning of a rune whose rest is still
// to come.
func partialRune(text []byte) int {
	for n := 1; n < utf8.UTFMax && n <= len(text); n++ {
		c := text[len(text)-n]
		if utf8.RuneStart(c) {
			if c >= utf8.RuneSelf && !utf8.FullRune(text[len(text)-n:]) {
				return n
			}
			return 0
		}
	}
	return 0
}

const hexDigits = "0123456789abcdef"

// appendText escapes text for a JSON string. Bytes that are not UTF-8 become U+FFFD.
func appendText(out, text []byte) []byte {
	start := 0
	for i := 0; i < len(text); {
		c := text[i]
		if c >= ' ' && c < utf8.RuneSelf && c != '"' && c != '\\' {
			i++
			continue
		}
		if c >= utf8.RuneSelf {
			r, size := utf8.DecodeRune(text[i:])
			if r != utf8.RuneError || size > 1 {
				i += size
				continue
			}
			out = append(append(out, text[start:i]...), "\uFFFD"...)
			i++
			start = i
			continue
		}
		out = append(out, text[start:i]...)
		switch c {
		case '"', '\\':
			out = append(out, '\\', c)
		case '\n':
			out = append(out, `\n`...)
		case '\r':
			out = append(out, `\r`...)
		case '\t':
			out = append(out, `\t`...)
		default:
			out = append(out, '\\', 'u', '0', '0', hexDigits[c>>4], hexDigits[c&15])
		}
		i++
		start = i
	}
	return append(out, text[start:]...)
}
