// SPDX-License-Identifier: Apache-2.0

package command

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"io"
	"slices"
	"strings"
	"testing"

	"opensandbox.io/node/wire"
)

// written is what a program wrote to a stream at once.
type written struct {
	stream Stream
	data   string
}

// framed writes output to a spool and gives the events that come of it, read in steps of a size.
func framed(t *testing.T, spool *Spool, output []written, step int) []wire.ExecutionEvent {
	t.Helper()
	log := spool.newLog("x")
	defer spool.forget(log)
	log.opened(1)
	var length int64
	for _, w := range output {
		log.append(w.stream, []byte(w.data))
		length += int64(len(w.data))
	}
	log.finish(length)
	defer log.writerGone()
	reader, err := log.follow(0, false)
	if err != nil {
		t.Fatal(err)
	}
	defer reader.Close()
	var sent bytes.Buffer
	f := newFramer(&sent, false)
	f.reader = reader
	for buf := make([]byte, step); ; {
		n, s, _, done, err := reader.Read(buf)
		if err != nil {
			t.Fatal(err)
		}
		f.feed(s, buf[:n])
		if len(f.out) > 4*chunk+8*step { // a bad byte takes three
			t.Fatalf("%d bytes wait to be written", len(f.out))
		}
		if done {
			break
		}
	}
	f.close()
	f.flush()
	if f.failed != nil || f.gone != nil || f.lost != 0 {
		t.Fatal(f.failed, f.gone, f.lost)
	}
	return decoded(t, sent.Bytes())
}

// decoded reads what a framer has written, checking the framing itself.
func decoded(t *testing.T, out []byte) (events []wire.ExecutionEvent) {
	t.Helper()
	for event := range bytes.SplitSeq(out, []byte("\n\n")) {
		if len(event) == 0 {
			continue
		}
		events = append(events, parsed(t, event))
	}
	return events
}

// parsed reads one event.
func parsed(t *testing.T, event []byte) (e wire.ExecutionEvent) {
	t.Helper()
	if bytes.ContainsAny(event, "\n\r") {
		t.Fatalf("a raw line end in %q", event)
	}
	if err := json.Unmarshal(event, &e); err != nil {
		t.Fatalf("%v in %.100q", err, event)
	}
	if e.Text+e.Data == "" || e.Timestamp == 0 {
		t.Fatalf("an empty text, or no time: %q", event)
	}
	return e
}

func texts(events []wire.ExecutionEvent) (texts [2][]string) {
	for _, e := range events {
		s := Stdout
		if e.Type == "stderr" {
			s = Stderr
		}
		texts[s] = append(texts[s], e.Text)
	}
	return texts
}

// wanted is what must come out: one text for each line that says something, but for one newline at the very end, with
// U+FFFD for what is not UTF-8.
func wanted(output string) (texts []string) {
	text := ""
	for rest := strings.TrimSuffix(output, "\n"); rest != ""; {
		end := strings.IndexAny(rest, "\r\n")
		switch {
		case end < 0:
			text, rest = text+rest, ""
		case rest[end] == '\r':
			texts, text, rest = append(texts, text+rest[:end+1]), "", rest[end+1:]
		default:
			if text += rest[:end]; text != "" {
				texts = append(texts, text)
			}
			text, rest = "\n", rest[end+1:]
		}
	}
	if text != "" {
		texts = append(texts, text)
	}
	for i, text := range texts {
		texts[i] = string([]rune(text)) // each bad byte becomes one U+FFFD
	}
	return texts
}

func TestFramerSendsEachLineAsOneText(t *testing.T) {
	spool := testSpool(t, 64<<20, 64<<20)
	long := strings.Repeat("ä€𝄞", 30_000)
	for _, output := range []string{
		"", "a", "a\n", "\n", "\n\n", "\n\n\na\n\n", "a\r\nb", "a\rb\r", "\r\n\r\n", "\r\r\n\n\r", "x\n" + long + "\ny", long, long + "\r" + long + "\r\n" + long + "\n",
		"\xff\xfe\n\xe2\x82", strings.Repeat("\xff", 70_000), strings.Repeat("\xe2\x82", 70_000) + "\n\n",
		strings.Repeat("x", chunk) + "\n" + strings.Repeat("y", chunk+1) + "\n", strings.Repeat("x", 200_000), strings.Repeat("€x", 1_250_000) + "\n",
	} {
		for _, step := range []int{1, 2, 3, 7, 4096, 65535, chunk} {
			if len(output) > 10_000 && step < 4096 {
				continue
			}
			got := texts(framed(t, spool, []written{{Stdout, output}}, step))[Stdout]
			if !slices.Equal(got, wanted(output)) {
				t.Errorf("%.20q (%d) by %d: got %d texts %.80q", output, len(output), step, len(got), got)
			}
		}
	}
}

func TestLongLinesOfTwoStreamsStayWhole(t *testing.T) {
	spool := testSpool(t, 64<<20, 64<<20)
	var output []written
	var streams [2]string
	add := func(s Stream, data string) {
		output = append(output, written{s, data})
		streams[s] += data
	}
	for i := range 300 {
		add(Stdout, strings.Repeat("o€", 500)+"\xe2") // the rest of the rune comes after the other stream
		add(Stderr, strings.Repeat("e", 900))
		add(Stdout, "\x82\xac")
		if i%100 == 50 {
			add(Stderr, "\nshort\n")
		}
		if i == 200 {
			add(Stdout, "\n")
		}
	}
	for _, step := range []int{100, 4096, chunk} {
		got := texts(framed(t, spool, output, step))
		for s, text := range streams {
			if !slices.Equal(got[s], wanted(text)) {
				t.Errorf("stream %d by %d: %d texts, want %d", s, step, len(got[s]), len(wanted(text)))
			}
		}
	}
}

// What the spool could not keep until its end is sent as it grows. Nothing is in between, or the line is continued.
func TestALineThatTheSpoolCannotHold(t *testing.T) {
	spool := testSpool(t, 2<<20, 64<<20)
	line := strings.Repeat("€", 500_000)
	if got := texts(framed(t, spool, []written{{Stdout, line}}, chunk))[Stdout]; !slices.Equal(got, []string{line}) {
		t.Errorf("%d texts", len(got))
	}
	output := []written{{Stdout, "a\n" + line[:700_000]}, {Stderr, "one\ntwo"}, {Stdout, line[700_000:] + "\nb\n"}, {Stderr, "\n"}}
	got := texts(framed(t, spool, output, chunk))
	if strings.Join(got[Stdout], "") != "a\n"+line+"\nb" || len(got[Stdout]) != 4 {
		t.Errorf("%d texts", len(got[Stdout]))
	}
	if !slices.Equal(got[Stderr], []string{"one", "\ntwo"}) {
		t.Errorf("stderr %.80q", got[Stderr])
	}
}

func TestWhatWasDroppedOfALongLineIsCounted(t *testing.T) {
	spool := testSpool(t, 64<<20, 64<<20)
	log := spool.newLog("x")
	log.opened(1)
	log.append(Stdout, bytes.Repeat([]byte("x"), 300_000))
	reader, err := log.follow(0, false)
	if err != nil {
		t.Fatal(err)
	}
	defer reader.Close()
	var sent bytes.Buffer
	f := newFramer(&sent, false)
	f.reader = reader
	for buf := make([]byte, chunk); ; {
		n, s, _, _, err := reader.Read(buf)
		if err != nil {
			t.Fatal(err)
		}
		if n == 0 {
			break
		}
		f.feed(s, buf[:n])
	}
	log.shrink(200_000)
	f.close()
	f.flush()
	got := texts(decoded(t, sent.Bytes()))[Stdout]
	if len(got) != 1 || len(got[0])+int(f.lost) != 300_000 || f.lost < 200_000 {
		t.Errorf("%d texts, %d bytes lost", len(got), f.lost)
	}
}

func TestExactFramerGivesEveryByteBackAtOnce(t *testing.T) {
	f := newFramer(nil, true)
	f.reader = &Reader{}
	for _, piece := range []string{"prompt: ", "\xff\x00\r", "\n\n", ""} {
		before := len(f.out)
		f.feed(Stderr, []byte(piece))
		event := f.out[before:]
		if piece == "" {
			if len(event) > 0 {
				t.Errorf("an event for nothing: %s", event)
			}
			continue
		}
		var e wire.ExecutionEvent
		if err := json.Unmarshal(event, &e); err != nil {
			t.Fatalf("%v in %q", err, event)
		}
		got, err := base64.StdEncoding.DecodeString(e.Data)
		if string(got) != piece || err != nil || e.Type != "stderr" || e.Text != "" {
			t.Errorf("%q came as %q in %s (%v)", piece, got, event, err)
		}
	}
	before := len(f.out)
	if f.close(); len(f.out) != before {
		t.Errorf("something was left: %s", f.out[before:])
	}
}

func TestFramerTellsHowItFrames(t *testing.T) {
	f := newFramer(nil, false)
	f.event(wire.ExecutionEventTypeInit, "abc")
	if got := decoded(t, f.out)[0]; got.Framing != "joined" || got.Text != "abc" {
		t.Errorf("%s", f.out)
	}
	f = newFramer(nil, true)
	f.event(wire.ExecutionEventTypeInit, "abc")
	if got := decoded(t, f.out)[0]; got.Framing != "exact" {
		t.Errorf("%s", f.out)
	}
}

func FuzzFramer(f *testing.F) {
	f.Add([]byte("a\nb\r\nc\rd\n"), []byte("err\n\n"), uint8(3))
	f.Add([]byte("\xe2\x82\xac\xff\x00\""), []byte("\r\n"), uint8(1))
	f.Fuzz(func(t *testing.T, stdout, stderr []byte, step uint8) {
		n := int(step) + 1
		var output []written
		for a, b := string(stdout), string(stderr); len(a)+len(b) > 0; {
			k, m := min(n, len(a)), min(n, len(b))
			output = append(output, written{Stdout, a[:k]}, written{Stderr, b[:m]})
			a, b = a[k:], b[m:]
		}
		got := texts(framed(t, testSpool(t, 1<<20, 1<<20), output, n))
		if !slices.Equal(got[0], wanted(string(stdout))) || !slices.Equal(got[1], wanted(string(stderr))) {
			t.Errorf("%q %q came back as %q", stdout, stderr, got)
		}
	})
}

func TestPartialRune(t *testing.T) {
	for text, want := range map[string]int{"": 0, "a": 0, "\xe2": 1, "\xe2\x82": 2, "\xe2\x82\xac": 0, "\xf0\x9d\x84": 3, "\x82": 0, "\xff": 0, "a\xc3": 1} {
		if got := partialRune([]byte(text)); got != want {
			t.Errorf("%q: %d", text, got)
		}
	}
}

func BenchmarkFramerLines(b *testing.B) {
	data := bytes.Repeat([]byte("a line of ordinary output, as programs write it\n"), 1000)
	b.SetBytes(int64(len(data)))
	f := newFramer(io.Discard, false)
	f.reader = &Reader{log: &Log{spool: newSpool(nil)}}
	for b.Loop() {
		f.feed(Stdout, data)
		f.flush()
	}
}
