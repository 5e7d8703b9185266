// SPDX-License-Identifier: Apache-2.0

package command

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"strings"
	"testing"

	"opensandbox.io/node/wire"
)

// texts decodes what a framer has written, checking the framing itself.
func texts(t *testing.T, out []byte) (streams [2]string, longest int) {
	t.Helper()
	for event := range bytes.SplitSeq(out, []byte("\n\n")) {
		if len(event) == 0 {
			continue
		}
		if bytes.ContainsAny(event, "\n\r") {
			t.Fatalf("a raw line end in %q", event)
		}
		var e wire.ExecutionEvent
		if err := json.Unmarshal(event, &e); err != nil {
			t.Fatalf("%v in %q", err, event)
		}
		if e.Text == "" {
			t.Fatalf("an empty text: %q", event)
		}
		s := 0
		if e.Type == "stderr" {
			s = 1
		}
		streams[s] += e.Text
		longest = max(longest, len(e.Text))
	}
	return streams, longest
}

// sent is what must come out: the output but for one line end at its very end, with U+FFFD for what is not UTF-8.
func sent(output string) string {
	for _, end := range []string{"\r\n", "\n", "\r"} {
		if cut, ok := strings.CutSuffix(output, end); ok {
			output = cut
			break
		}
	}
	return string([]rune(output)) // each bad byte becomes one U+FFFD
}

func TestFramerGivesTheOutputBack(t *testing.T) {
	long := strings.Repeat("ä€𝄞", 30_000)
	for _, output := range []string{"", "a", "a\n", "\n", "\n\n", "a\r\nb", "a\rb\r", "\r\n\r\n", "x\n" + long + "\ny", long, "\xff\xfe\n\xe2\x82", strings.Repeat("\xff", 70_000)} {
		for _, step := range []int{1, 2, 3, 7, 4096, 1 << 20} {
			if len(output) > 10_000 && step < 7 {
				continue
			}
			f := newFramer(false)
			for rest := output; rest != ""; {
				n := min(step, len(rest))
				f.feed(Stdout, []byte(rest[:n]))
				rest = rest[n:]
			}
			f.close()
			got, longest := texts(t, f.out)
			if got[0] != sent(output) {
				t.Errorf("%.20q by %d: got %d bytes %.40q", output, step, len(got[0]), got[0])
			}
			if longest > 3*chunk+2 { // a bad byte takes three
				t.Errorf("a text of %d bytes", longest)
			}
		}
	}
}

func TestExactFramerGivesEveryByteBackAtOnce(t *testing.T) {
	f := newFramer(true)
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

func FuzzFramer(f *testing.F) {
	f.Add([]byte("a\nb\r\nc\rd\n"), []byte("err\n\n"), uint8(3))
	f.Add([]byte("\xe2\x82\xac\xff\x00\""), []byte("\r\n"), uint8(1))
	f.Fuzz(func(t *testing.T, stdout, stderr []byte, step uint8) {
		n := int(step) + 1
		fr := newFramer(false)
		a, b := stdout, stderr
		for len(a)+len(b) > 0 {
			k := min(n, len(a))
			fr.feed(Stdout, a[:k])
			a = a[k:]
			k = min(n, len(b))
			fr.feed(Stderr, b[:k])
			b = b[k:]
		}
		fr.close()
		got, _ := texts(t, fr.out)
		if got[0] != sent(string(stdout)) || got[1] != sent(string(stderr)) {
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
	f := newFramer(false)
	for b.Loop() {
		f.feed(Stdout, data)
		f.out = f.out[:0]
	}
}
