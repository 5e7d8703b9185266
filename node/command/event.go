// SPDX-License-Identifier: Apache-2.0

package command

import (
	"bytes"
	"encoding/base64"
	"io"
	"strconv"
	"time"
	"unicode/utf8"

	"opensandbox.io/node/reply"
	"opensandbox.io/node/wire"
)

// Stream tells standard output and standard error apart.
type Stream uint8

// The streams of a command. Where both are merged as they come there is only the first.
const (
	Stdout Stream = iota
	Stderr
)

var streamNames = [2]string{Stdout: "stdout", Stderr: "stderr"}

func (s Stream) event() wire.ExecutionEventType {
	if s == Stderr {
		return wire.ExecutionEventTypeStderr
	}
	return wire.ExecutionEventTypeStdout
}

// chunk is how much is read, held of a line and written at once.
const chunk = 64 << 10

// framer turns output into events. Contract (spec/execd.yaml, x-framing): a line is sent when it is complete, as one
// event and without its terminator, which goes in front of the next text of the same stream; the one left over at the
// end is dropped. A text ends behind a \r too: progress bars come through as they are drawn.
//
// A line longer than a chunk is not held: when its end has come it is read again from the spool and written piece by
// piece. The spool keeps only so much, therefore a line that goes on for long is sent while it grows; its event is
// closed, and continued by another, only when something else has to be said meanwhile.
//
// An exact framer knows no lines: what it is fed is one event at once, as bytes.
//
// Each event names an offset: the place in the output at which another framer takes over from here (see resume). It is
// the place behind the line's terminator, the pending one included. Of the other stream a line may have begun before
// it that is not sent yet: whether that is so follows from the output alone.
type framer struct {
	exact   bool
	pieces  bool // somebody else makes the events of output, of texts as they come
	w       io.Writer
	reader  *Reader // where what it is fed comes from; nil: it is fed nothing
	lines   [2]line
	open    *line  // the one whose event is begun and not ended
	out     []byte // encoded events that wait to be written
	stamp   []byte // the time of what is being fed, encoded; asking for it once per line costs more than the line
	oneLeft bool   // of two incomplete last lines the first is sent; see close
	lost    int64  // bytes of lines that the spool had dropped when they were read again
	gone    error  // why nothing can be written any more
	failed  error  // why the spool could not be read
}

// line is what is known of a stream's current line.
type line struct {
	stream  Stream
	pending bool     // the last line's terminator is not yet sent
	text    []byte   // the line so far; of a line in pieces, the beginning of a rune
	size    int64    // bytes of the line so far
	start   position // of its first byte
	sent    int64    // offset behind what of it is sent, for the event that is open
	fed     int64    // offset behind what of a line in pieces has come
	form    form
}

// form is how a line is kept until it is sent.
type form uint8

const (
	held     form = iota // in memory
	spooled              // in the spool alone
	inPieces             // not at all: it is being sent
)

func newFramer(w io.Writer, exact bool) *framer {
	f := &framer{w: w, exact: exact}
	f.lines[Stderr].stream = Stderr
	return f
}

func (f *framer) tick() { f.stamp = strconv.AppendInt(f.stamp[:0], time.Now().UnixMilli(), 10) }

// flush writes the events that wait.
func (f *framer) flush() {
	if len(f.out) > 0 && f.gone == nil {
		_, f.gone = f.w.Write(f.out)
	}
	f.out = f.out[:0]
	if cap(f.out) > 4*chunk {
		f.out = nil // something large came once; the stream may go on for days
	}
}

// feed takes what the reader has just given.
func (f *framer) feed(s Stream, data []byte) {
	f.tick()
	if f.exact {
		f.emitExact(s, data)
		return
	}
	l := &f.lines[s]
	newline := -1 // position of the next \n, -1 unknown; kept so that many \r do not make many searches
	for len(data) > 0 {
		if newline < 0 {
			if newline = bytes.IndexByte(data, '\n'); newline < 0 {
				newline = len(data)
			}
		}
		end, width := newline, 0
		if r := bytes.IndexByte(data[:newline], '\r'); r >= 0 {
			end, width = r, 1 // it is text
		}
		if end == len(data) {
			f.extend(l, data, 0)
			return
		}
		behind := len(data) - end - width
		f.extend(l, data[:end+width], behind)
		f.finish(l, behind, f.reader.before(len(data)-end-1).off)
		l.pending = width == 0
		data = data[end+1:]
		newline -= end + 1
	}
}

// extend adds to a line. behind is how many of the bytes that were read come after these.
func (f *framer) extend(l *line, data []byte, behind int) {
	if len(data) == 0 {
		return
	}
	if l.size == 0 {
		l.start = f.reader.before(len(data) + behind)
	}
	l.size += int64(len(data))
	switch {
	case l.form == inPieces:
		f.piece(l, data, f.reader.before(behind).off)
	case l.size <= min(chunk, f.reader.repeatable()):
		l.text = append(l.text, data...)
	default:
		l.form, l.text = spooled, l.text[:0]
		if l.size > f.reader.repeatable() {
			f.again(l, behind)
		}
	}
}

// finish sends a line that is complete, as the event whose offset is at. An empty text says nothing and is not sent.
func (f *framer) finish(l *line, behind int, at int64) {
	if l.form == spooled {
		f.again(l, behind)
	}
	if len(l.text) > 0 || l.form == held && l.pending {
		f.begin(l)
		f.out = appendText(f.out, l.text)
	}
	if f.open == l {
		l.sent = at
		f.cut()
	}
	l.form, l.size, l.text = held, 0, l.text[:0]
	if len(f.out) >= chunk {
		f.flush()
	}
}

// leftover is true when there is something of the line that has not been sent.
func (l *line) leftover() bool {
	if l.form == inPieces {
		return len(l.text) > 0
	}
	return l.size > 0
}

// close sends the last lines, which had no end: first the one of the stream that did not write last. An event of the
// other may already have the offset of the end; then the one that remains gets the next number, as if the newline it
// lacks were there.
func (f *framer) close() {
	f.tick()
	f.cut()
	end := f.reader.off
	if f.lines[Stdout].leftover() || f.lines[Stderr].leftover() {
		owner, _, err := f.reader.byteBefore()
		if err != nil {
			f.failed = err
			return
		}
		last, other := &f.lines[owner], &f.lines[1-owner]
		switch {
		case last.form != inPieces && last.leftover() && (f.oneLeft || other.leftover()):
			if !f.oneLeft {
				f.finish(other, 0, end)
			}
			f.finish(last, 0, end+1)
		case last.leftover():
			f.finish(last, 0, end)
			fallthrough
		default:
			if other.leftover() {
				f.finish(other, 0, end+1)
			}
		}
	}
	for s := range f.lines {
		f.lines[s] = line{stream: Stream(s)}
	}
}

// again sends what the spool has of a line, up to what was read last but for the bytes behind it.
func (f *framer) again(l *line, behind int) {
	l.form = inPieces
	buf := buffers.Get().(*[chunk]byte)
	defer buffers.Put(buf)
	reader, end := f.reader.from(l.start), f.reader.before(behind).off
	var found int64
	for reader.off < end {
		n, s, _, _, err := reader.Read(buf[:min(chunk, end-reader.off)])
		if err != nil {
			f.failed = err
			return
		}
		if over := reader.off - end; over > 0 {
			n = max(0, n-int(over)) // what comes before was dropped
		}
		if n == 0 {
			break
		}
		if s == l.stream {
			f.piece(l, buf[:n], min(reader.off, end))
			found += int64(n)
		}
	}
	f.lost += l.size - found
}

// piece sends a part of a line that ends at an offset. Of a rune only all bytes together.
func (f *framer) piece(l *line, data []byte, end int64) {
	send, keep := l.split(data, end)
	if len(send) > 0 {
		f.begin(l)
		f.out = appendText(f.out, send)
		l.sent = end - int64(len(keep))
	}
	l.text = append(l.text[:0], keep...)
	if len(f.out) >= chunk {
		f.flush()
	}
}

// split divides what of a line in pieces has come so far into what is sent now and the beginning of a rune. It depends
// on what the streams wrote in which order, and not on how that is read: resume counts on it.
//
// Something of the new bytes is sent, or nothing: an event with nothing of them would have no offset of its own. So
// where the beginning of a rune turns out to be none when the other stream has written meanwhile, the next beginning
// goes with it.
func (l *line) split(data []byte, end int64) (send, keep []byte) {
	held := len(l.text)
	if end-int64(len(data)) == l.fed {
		held = 0 // nothing was in between
	}
	l.fed = end
	l.text = append(l.text, data...)
	cut := len(l.text) - partialRune(l.text)
	if cut <= held && cut > 0 {
		cut = len(l.text)
	}
	return l.text[:cut], l.text[cut:]
}

// begin opens the event of a line, with the pending terminator in front.
func (f *framer) begin(l *line) {
	if f.open == l {
		return
	}
	f.head(l.stream.event())
	f.out = append(f.out, `,"text":"`...)
	if l.pending {
		f.out = append(f.out, `\n`...)
	}
	l.pending = false
	f.open = l
}

// cut ends the event that is open.
func (f *framer) cut() {
	if f.open != nil {
		at := f.open.sent
		f.open = nil
		f.out = append(f.out, '"')
		f.offset(at)
		f.tail()
	}
}

func (f *framer) offset(at int64) {
	f.out = append(f.out, `,"offset":`...)
	f.out = strconv.AppendInt(f.out, at, 10)
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
	f.offset(f.reader.off)
	f.tail()
}

// missing says that so many bytes will not come, and gives their number back.
func (f *framer) missing(lost int64) int64 {
	if lost > 0 {
		f.event(wire.ExecutionEventTypeStatus, strconv.FormatInt(lost, 10)+" bytes of output were dropped before they could be sent")
	}
	return lost
}

// event encodes an event with a plain text.
func (f *framer) event(kind wire.ExecutionEventType, text string) {
	f.tick()
	f.head(kind)
	f.out = append(f.out, `,"text":"`...)
	f.out = appendText(f.out, []byte(text))
	f.out = append(f.out, '"')
	if kind == wire.ExecutionEventTypeInit {
		f.out = append(append(append(f.out, `,"framing":"`...), f.framing()...), '"')
	}
	f.tail()
}

func (f *framer) framing() wire.ExecutionEventFraming {
	switch {
	case f.exact:
		return wire.ExecutionEventFramingExact
	case f.pieces:
		return wire.ExecutionEventFramingPieces
	}
	return wire.ExecutionEventFramingJoined
}

// terminal encodes the one event that ends a stream. Without a reader there was no output to have an offset.
func (f *framer) terminal(end *wire.CommandEnd, took time.Duration) {
	ms := took.Milliseconds()
	e := wire.ExecutionEvent{Timestamp: time.Now().UnixMilli(), End: end}
	if end == nil || end.Reason != wire.CommandEndReasonStartFailed && end.ExitCode != nil && *end.ExitCode == 0 {
		e.Type, e.ExecutionTime = wire.ExecutionEventTypeExecutionComplete, &ms
	} else {
		e.Type, e.Error = wire.ExecutionEventTypeError, executionError(end)
	}
	if f.reader != nil {
		e.Offset = &f.reader.off
	}
	data, err := reply.Marshal(e)
	if err != nil {
		panic(err) // plain strings and numbers: it cannot
	}
	f.cut()
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
	f.cut()
	f.out = append(f.out, `{"type":"`...)
	f.out = append(f.out, kind...)
	f.out = append(f.out, `","timestamp":`...)
	f.out = append(f.out, f.stamp...)
}

func (f *framer) tail() { f.out = append(f.out, "}\n\n"...) }

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
