package group

import (
	"encoding/binary"
	"fmt"
)

// fileTag accompanies every file, in the same message. The nonce is made by the receiver for one exchange and is known only to the group's ranks,
// which learn it through the rendezvous service. It identifies the job and the purpose of the file.
type fileTag struct {
	nonce  [16]byte
	seq    uint64 // the exchange's first collective call
	sender int    // world rank
	group  string
}

const (
	tagMagic  = "symmemf1"
	tagFixed  = len(tagMagic) + 16 + 8 + 4 + 2
	tagLength = tagFixed + maxText // the longest tag
)

func (t *fileTag) encode() ([]byte, error) {
	if len(t.group) > maxText {
		return nil, invalid("passing a file", "len(group)", len(t.group), fmt.Sprintf("at most %d bytes", maxText))
	}
	b := make([]byte, 0, tagFixed+len(t.group))
	b = append(b, tagMagic...)
	b = append(b, t.nonce[:]...)
	b = binary.LittleEndian.AppendUint64(b, t.seq)
	b = binary.LittleEndian.AppendUint32(b, uint32(t.sender))
	b = binary.LittleEndian.AppendUint16(b, uint16(len(t.group)))
	return append(b, t.group...), nil
}

func decodeTag(b []byte) (fileTag, error) {
	var t fileTag
	if len(b) < tagFixed || string(b[:len(tagMagic)]) != tagMagic {
		return t, fmt.Errorf("a message of %d bytes is no tag of a passed file", len(b))
	}
	b = b[len(tagMagic):]
	copy(t.nonce[:], b)
	b = b[len(t.nonce):]
	t.seq = binary.LittleEndian.Uint64(b)
	sender := binary.LittleEndian.Uint32(b[8:])
	length := int(binary.LittleEndian.Uint16(b[12:]))
	b = b[14:]
	if sender >= MaxWorldSize {
		return t, fmt.Errorf("the tag of a passed file names rank %d; a world has at most %d", sender, MaxWorldSize)
	}
	if length > maxText || length != len(b) {
		return t, fmt.Errorf("the tag of a passed file names a group in %d bytes and has %d; at most %d", length, len(b), maxText)
	}
	t.sender, t.group = int(sender), string(b)
	return t, nil
}
