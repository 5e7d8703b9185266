// SPDX-License-Identifier: Apache-2.0

package reply

import (
	"fmt"
	"io"
	"log/slog"
	"strings"
	"time"
	"unicode/utf8"
)

// attrMax bounds one value of a log line. Paths, names and errors come from clients and from inside sandboxes; the
// number of values in a line is ours.
const attrMax = 4 << 10

// NewLog makes the log of a daemon: one JSON object per line, with ts, level, msg and component first.
//
//	{"ts":"2026-01-02T03:04:05.678Z","level":"info","msg":"serving","component":"sandboxd","pid":7}
//
// No value can end its line or grow without bound: control characters are escaped, long values are cut.
func NewLog(w io.Writer, component string, level slog.Leveler) *slog.Logger {
	options := &slog.HandlerOptions{Level: level, ReplaceAttr: plain}
	return slog.New(slog.NewJSONHandler(w, options)).With("component", component)
}

// plain gives attributes the names that every daemon and the server use, and bounds their values.
func plain(groups []string, a slog.Attr) slog.Attr {
	if len(groups) == 0 {
		switch a.Key {
		case slog.TimeKey:
			if at, ok := a.Value.Any().(time.Time); ok {
				return slog.String("ts", at.UTC().Format("2006-01-02T15:04:05.000Z"))
			}
		case slog.LevelKey:
			return slog.String("level", strings.ToLower(a.Value.String()))
		case "sandbox":
			a.Key = "sandboxId"
		}
	}
	switch a.Value.Kind() {
	case slog.KindString:
		a.Value = slog.StringValue(bounded(a.Value.String()))
	case slog.KindAny:
		// Errors and whatever prints itself; numbers and times have kinds of their own.
		a.Value = slog.StringValue(bounded(fmt.Sprint(a.Value.Any())))
	}
	return a
}

// bounded cuts a text and takes out what JSON would leave in but a terminal would act on.
func bounded(s string) string {
	if len(s) > attrMax {
		s = s[:attrMax]
		for !utf8.ValidString(s[max(0, len(s)-utf8.UTFMax):]) && len(s) > attrMax-utf8.UTFMax {
			s = s[:len(s)-1]
		}
		s += "… (cut)"
	}
	if strings.IndexFunc(s, isTerminalControl) < 0 {
		return s
	}
	return strings.Map(func(r rune) rune {
		if isTerminalControl(r) {
			return utf8.RuneError
		}
		return r
	}, s)
}

func isTerminalControl(r rune) bool { return r >= 0x7f && r <= 0x9f }

// ParseLevel reads the level of a --log-level flag.
func ParseLevel(s string) (slog.Level, error) {
	for _, level := range []slog.Level{slog.LevelDebug, slog.LevelInfo, slog.LevelWarn, slog.LevelError} {
		if strings.EqualFold(s, level.String()) {
			return level, nil
		}
	}
	return 0, fmt.Errorf("the log level is debug, info, warn or error, not %q", s)
}
