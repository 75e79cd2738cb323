# A guest of one sector: no kernel, no agent, nothing but memory and a serial port.
#
# It keeps one number in 256 pages. Every round adds one to each, then reads all of them back: a page
# that is not like the first is told with an `X`, and the guest stops. After every 32 rounds the
# number goes to the serial port, as 8 hex digits and a line feed.
#
# A clone that got all pages of one instant goes on counting from there; one that got a page of
# another instant, or of no VM, says `X`.

        .set PAGES_AT,   0x1000000      # 16 MiB: far from what the firmware uses
        .set PAGES,      256
        .set PAGE_BYTES, 4096
        .set ROUNDS,     32             # between two lines; a power of two
        .set UART,       0x3f8

        .code16
        .globl  _start
_start: cli
        xorw    %ax, %ax
        movw    %ax, %ds
        lgdtl   descriptors
        movl    %cr0, %eax
        orb     $1, %al
        movl    %eax, %cr0
        ljmpl   $0x08, $flat            # 32 bits, no paging: addresses are what they seem

        .code32
flat:   movw    $0x10, %ax
        movw    %ax, %ds
        movw    %ax, %es
        movw    %ax, %ss
        movl    $0x7c00, %esp

round:  movl    $PAGES_AT, %esi
add:    incl    (%esi)
        addl    $PAGE_BYTES, %esi
        cmpl    $PAGES_AT + PAGES * PAGE_BYTES, %esi
        jb      add

        movl    PAGES_AT, %ebp
        movl    $PAGES_AT, %esi
check:  cmpl    %ebp, (%esi)
        jne     wrong
        addl    $PAGE_BYTES, %esi
        cmpl    $PAGES_AT + PAGES * PAGE_BYTES, %esi
        jb      check

        testl   $ROUNDS - 1, %ebp
        jnz     round
        movl    $8, %ecx
digit:  roll    $4, %ebp
        movl    %ebp, %ebx
        andl    $15, %ebx
        movb    digits(%ebx), %al
        call    put
        loop    digit
        movb    $'\n', %al
        call    put
        jmp     round

wrong:  movb    $'X', %al
        call    put
stop:   hlt
        jmp     stop

# Print %al once the port takes it; keeps all but %edx and %ah.
put:    movb    %al, %ah
        movl    $UART + 5, %edx
busy:   inb     %dx, %al
        testb   $0x20, %al
        jz      busy
        movb    %ah, %al
        movl    $UART, %edx
        outb    %al, %dx
        ret

digits: .ascii  "0123456789abcdef"

        .balign 8
table:  .quad   0
        .quad   0x00cf9a000000ffff      # code: all 4 GiB
        .quad   0x00cf92000000ffff      # data: all 4 GiB
descriptors:
        .word   descriptors - table - 1
        .long   table

        .org    510
        .word   0xaa55                  # what makes a sector bootable
