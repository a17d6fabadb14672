package trace

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"slices"
	"time"
)

const (
	// MaxLine is the longest line a Reader takes, in bytes, with its line end. It bounds the memory of a Reader.
	MaxLine = 16 << 20
	// MaxTimeMS is the largest timestamp a Reader takes: the last whole millisecond that fits a time.Duration.
	MaxTimeMS = math.MaxInt64 / int64(time.Millisecond)
)

// Reader reads requests one by one. It is not safe for concurrent use.
type Reader struct {
	lines *bufio.Scanner
	file  io.Closer // the file that Open opened, nil otherwise
	line  int       // number of the line read last, from 1
	last  int64     // timestamp of the request read last
	ids   idList    // scratch
	err   error     // what ended the stream
}

// NewReader returns a Reader of r, which may be gzip compressed: that is told from its first two bytes. It fails when
// they cannot be read or the gzip header is broken. An empty r is a trace without requests. The Reader reads ahead, and
// closing r stays the business of the caller.
func NewReader(r io.Reader) (*Reader, error) {
	br := bufio.NewReaderSize(r, 64<<10)
	magic, err := br.Peek(2)
	if err != nil && err != io.EOF {
		return nil, fmt.Errorf("read trace: %w", err)
	}
	var text io.Reader = br
	if bytes.Equal(magic, []byte{0x1f, 0x8b}) {
		if text, err = gzip.NewReader(br); err != nil {
			return nil, fmt.Errorf("read trace: %w", noEOF(err))
		}
	}
	s := bufio.NewScanner(text)
	s.Buffer(make([]byte, 0, 64<<10), MaxLine)
	return &Reader{lines: s}, nil
}

// Open returns a Reader of the named file. The caller closes it.
func Open(path string) (*Reader, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("open trace: %w", err)
	}
	r, err := NewReader(f)
	if err != nil {
		_ = f.Close() // nothing was written, and err says more
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	r.file = f
	return r, nil
}

// Close closes the file that Open opened. Next must not be called afterwards. It may be called again.
func (r *Reader) Close() error {
	if r.file == nil {
		return nil
	}
	f := r.file
	r.file = nil
	return f.Close()
}

// Line is the number of the line that Next read last, from 1; 0 before the first.
func (r *Reader) Line() int { return r.line }

// Next returns the next request; the caller owns its memory. At the end of the trace the error is io.EOF itself. Any
// other error names the line, and comes back from each later call. Blank lines are skipped.
func (r *Reader) Next() (Request, error) {
	if r.err != nil {
		return Request{}, r.err
	}
	req, err := r.next()
	if err != nil {
		if err != io.EOF {
			err = fmt.Errorf("line %d: %w", r.line, err)
		}
		r.err = err
		return Request{}, err
	}
	return req, nil
}

func (r *Reader) next() (Request, error) {
	for r.lines.Scan() {
		r.line++
		text := bytes.TrimSpace(r.lines.Bytes())
		if len(text) == 0 {
			continue
		}
		return r.parse(text)
	}
	err := r.lines.Err()
	if err == nil {
		return Request{}, io.EOF
	}
	r.line++ // it is the line not read that is at fault
	if errors.Is(err, bufio.ErrTooLong) {
		return Request{}, fmt.Errorf("longer than %d MiB", MaxLine>>20)
	}
	return Request{}, noEOF(err)
}

// noEOF keeps a stream that was cut off from passing for one that ended.
func noEOF(err error) error {
	if err == io.EOF {
		return io.ErrUnexpectedEOF
	}
	return err
}

// parse reads one line and checks it against the one before. Pointers tell fields that are absent from zeros.
func (r *Reader) parse(text []byte) (Request, error) {
	var l struct {
		Timestamp    *int64  `json:"timestamp"`
		InputLength  *int64  `json:"input_length"`
		OutputLength *int64  `json:"output_length"`
		HashIDs      *idList `json:"hash_ids"`
		Session      *int64  `json:"session"`
		Agent        string  `json:"agent"`
		Stop         string  `json:"stop"`
	}
	l.HashIDs = &r.ids
	r.ids.ids, r.ids.present = r.ids.ids[:0], false
	if err := json.Unmarshal(text, &l); err != nil {
		if te, ok := errors.AsType[*json.UnmarshalTypeError](err); ok && te.Field != "" {
			return Request{}, fmt.Errorf("%s: unexpected %s", te.Field, te.Value)
		}
		return Request{}, err
	}
	if l.HashIDs == nil || !l.HashIDs.present {
		return Request{}, errors.New("hash_ids is missing")
	}
	req := Request{Session: -1, Agent: l.Agent, Stop: l.Stop}
	var in, out int64
	for _, f := range []struct {
		name string
		from *int64
		to   *int64
		max  int64
	}{
		{"timestamp", l.Timestamp, &req.TimeMS, MaxTimeMS},
		{"input_length", l.InputLength, &in, math.MaxUint32},
		{"output_length", l.OutputLength, &out, math.MaxUint32},
		{"session", l.Session, &req.Session, math.MaxInt64},
	} {
		switch {
		case f.from != nil && (*f.from < 0 || *f.from > f.max):
			return Request{}, fmt.Errorf("%s is %d: want 0 to %d", f.name, *f.from, f.max)
		case f.from != nil:
			*f.to = *f.from
		case f.name != "session":
			return Request{}, fmt.Errorf("%s is missing", f.name)
		}
	}
	if req.TimeMS < r.last {
		return Request{}, fmt.Errorf("timestamp is %d, after %d: a trace is ordered by time", req.TimeMS, r.last)
	}
	r.last = req.TimeMS
	req.InputTokens, req.OutputTokens = uint32(in), uint32(out)
	req.IDs = slices.Clone(l.HashIDs.ids)
	return req, nil
}

// idList decodes an array of ids several times faster than encoding/json does; the arrays are nearly all of a trace.
type idList struct {
	ids     []uint64
	present bool
}

// UnmarshalJSON appends the ids of b, which is a valid JSON value.
func (l *idList) UnmarshalJSON(b []byte) error {
	var err error
	l.ids, err = appendIDs(l.ids[:0], b)
	l.present = err == nil
	return err
}

// appendIDs appends the numbers of a JSON array of whole numbers from 0 to 2⁶⁴-1 to ids. It accepts exactly what
// encoding/json accepts for a []uint64, but for null elements and a null array.
func appendIDs(ids []uint64, b []byte) ([]uint64, error) {
	i := skipSpace(b, 0)
	if i == len(b) || b[i] != '[' {
		return ids, errors.New("hash_ids is not an array")
	}
	i = skipSpace(b, i+1)
	if i < len(b) && b[i] == ']' {
		return ids, endOfIDs(b, i+1)
	}
	for {
		start, id := i, uint64(0)
		for i < len(b) && b[i]-'0' <= 9 {
			d := uint64(b[i] - '0')
			if id > (math.MaxUint64-d)/10 {
				return ids, fmt.Errorf("hash_ids[%d] is above %d", len(ids), uint64(math.MaxUint64))
			}
			id = id*10 + d
			i++
		}
		if i == start || (b[start] == '0' && i > start+1) {
			return ids, fmt.Errorf("hash_ids[%d] is not a whole number from 0", len(ids))
		}
		ids = append(ids, id)
		i = skipSpace(b, i)
		switch {
		case i < len(b) && b[i] == ',':
			i = skipSpace(b, i+1)
		case i < len(b) && b[i] == ']':
			return ids, endOfIDs(b, i+1)
		default:
			return ids, fmt.Errorf("hash_ids[%d] is not a whole number from 0", len(ids)-1)
		}
	}
}

// endOfIDs checks that nothing follows the array.
func endOfIDs(b []byte, i int) error {
	if skipSpace(b, i) != len(b) {
		return errors.New("hash_ids is followed by something else")
	}
	return nil
}

// skipSpace returns the index of the first byte from i on that is not JSON white space.
func skipSpace(b []byte, i int) int {
	for i < len(b) && (b[i] == ' ' || b[i] == '\n' || b[i] == '\t' || b[i] == '\r') {
		i++
	}
	return i
}
